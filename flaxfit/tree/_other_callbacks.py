"""The counterparts of callbacks that have other names in Keras and Lightning."""

COUNTERPARTS = {
    "ModelCheckpoint": "checkpoints.CheckpointFileWriter",
    "BackupAndRestore": "fit(checkpoint_dir=...)",
    "LambdaCallback": "callbacks.Events",
    "LearningRateMonitor": "metric learning_rate, which an OptimizerDef reports",
    "TensorBoard": "callbacks.TensorBoardLogger",
    "TerminateOnNaN": "callbacks.StopOnNaN",
    "SwapEMAWeights": "Model(ema=...)",
}
