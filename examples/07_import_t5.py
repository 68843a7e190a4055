"""Import a T5 checkpoint under its original names, fine-tune it on another task, and export it.

    pip install 'flaxfit[export]'
    python examples/07_import_t5.py

Real ones are large, so the example first makes a small stand-in: a T5 that has learned to sort,
under the names that mesh-TensorFlow gave to T5's variables, in an .npz file. The folder of a real
T5 v1.1, as TensorFlow wrote it, takes the place of "t5.npz" as it is, with the sizes of that
model. T5 v1.0 is `Sizes(..., gated=False, tied_logits=True)`.
"""

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from models.t5 import T5, Sizes

import flaxfit as ff
from flaxfit import importers

SIZES = Sizes(vocab=20, d_model=32, d_ff=64, n_heads=4, d_kv=8, n_layers=1)
LENGTH = 6
OPTIMIZER = optax.adam(3e-3)


def examples(n, order, seed):
    """Random tokens and, as a second input and as the labels, the same in another order."""
    tokens = np.random.default_rng(seed).integers(1, SIZES.vocab, (n, LENGTH), np.int32)
    targets = np.sort(tokens)[:, ::order]
    # The decoder gets the targets shifted by one: it predicts each token from the earlier ones.
    return (tokens, targets), targets


def train(init, order, n_steps):
    """Trains up to a step; prints metrics on held-out tokens."""
    data = ff.ArrayStream(*examples(8192, order, seed=0), batch_size=64, shuffle=True)
    task = ff.TrainTask(T5(SIZES).apply, OPTIMIZER, "crossentropy", data)
    test = ff.EvalTask(T5(SIZES).apply, ["accuracy"], examples(512, order, seed=1))
    loop = ff.TrainLoop(
        init,
        task,
        jax.random.key(0),
        n_steps=n_steps,
        n_steps_per_checkpoint=100,
        callbacks=[ff.EvalLoop(test, name="test")],
        stdout=False,
    )
    for checkpoint in loop:
        accuracy = checkpoint.metrics["test_accuracy"]
        print(f"step {checkpoint.step:4}  loss {checkpoint.loss:.3f}  test accuracy {accuracy:.4f}")
    return checkpoint


def main():
    print("a small T5 learns to sort")
    sorting = train(T5(SIZES).init, order=1, n_steps=200)

    # Exported under the old names: the rules of `t5_translator` run backwards.
    flat = flatten_dict({"target": sorting.state.params}, sep="/")
    old_names = importers.t5_translator.inverse.apply(flat)
    np.savez("t5.npz", **old_names, global_step=sorting.step)

    print("what is in the checkpoint, and what becomes of it")
    importers.t5_translator.dry_run(importers.load("t5.npz"))

    # Imported: compared with the model, name by name and shape by shape, before it is read.
    inputs = (np.ones((1, LENGTH), np.int32),) * 2
    fresh = ff.init_state(T5(SIZES).init, OPTIMIZER, 1, inputs)
    state = importers.restore_from_t5(fresh, "t5.npz", optimizer_state=False)

    print("fine-tuned to sort downwards")
    tuned = train(state, order=-1, n_steps=int(state.step) + 150)

    # Exported: a file that runs without this code, for batches and sentences of any size.
    specs = (ff.export.InputSpec(("batch", "length"), "int32"),) * 2
    ff.export.save(ff.export.from_state(tuned, T5(SIZES).apply, specs), "t5.stablehlo")
    exported = ff.export.load("t5.stablehlo")
    inputs, targets = examples(512, order=-1, seed=1)
    accuracy = np.mean(exported(*inputs).argmax(-1) == targets)
    print(f"the exported model: test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
