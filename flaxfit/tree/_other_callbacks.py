"""What is used here in place of the callbacks of Keras and Lightning of other names."""

COUNTERPARTS = {
    "ModelCheckpoint": "checkpoints.CheckpointFileWriter",
    "BackupAndRestore": "fit(checkpoint_dir=...)",
    "LambdaCallback": "callbacks.Events",
    "LearningRateMonitor": "metric learning_rate, which an OptimizerDef reports",
    "TensorBoard": "callbacks.TensorBoardLogger",
    "TerminateOnNaN": "callbacks.StopOnNaN",
    "SwapEMAWeights": "Model(ema=...)",
}
