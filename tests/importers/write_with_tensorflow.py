"""Writes checkpoints with TensorFlow itself, under the names that mesh-TensorFlow gave to T5.

    python write_with_tensorflow.py FOLDER [NAME ...]

The tests run it where TensorFlow is installed, and compare with `CHECKPOINTS`. The folder
`fixtures` holds three that it wrote: `small_t5`, `partitioned` and `dtypes`.
"""

import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np


def shapes(
    *, vocab=64, d_model=16, d_ff=32, heads=2, d_kv=8, layers=2, gated=True, per_layer_bias=False
):
    """The variables of an encoder and a decoder: of T5 v1.1, or not gated, of v1.0."""
    found = {"shared/embedding": (vocab, d_model)}
    if gated:  # The others take the embedding for the logits, too.
        found["decoder/logits/kernel"] = (d_model, vocab)
    for tower in ("encoder", "decoder"):
        found |= tower_shapes(
            tower, d_model, d_ff, heads, heads * d_kv, layers, gated, per_layer_bias
        )
    return found


def tower_shapes(tower, d_model, d_ff, heads, joined, layers, gated, per_layer_bias):
    """The variables of one stack of blocks."""
    found = {}
    norm = "rms_norm" if gated else "layer_norm"
    for block in range(layers):
        kinds = ["SelfAttention", "DenseReluDense"]
        if tower == "decoder":
            kinds.insert(1, "EncDecAttention")
        for number, kind in enumerate(kinds):
            layer = f"{tower}/block_{block:03d}/layer_{number:03d}"
            found[f"{layer}/{norm}/scale"] = (d_model,)
            if kind == "DenseReluDense":
                for name in ("wi_0", "wi_1") if gated else ("wi",):
                    found[f"{layer}/{kind}/{name}/kernel"] = (d_model, d_ff)
                found[f"{layer}/{kind}/wo/kernel"] = (d_ff, d_model)
                continue
            found |= {f"{layer}/{kind}/{name}": (d_model, joined) for name in "qkv"}
            found[f"{layer}/{kind}/o"] = (joined, d_model)
            if kind == "SelfAttention" and (per_layer_bias or block == 0):
                found[f"{layer}/{kind}/relative_attention_bias"] = (heads, 32)
    found[f"{tower}/{'rms_norm' if gated else 'final_layer_norm'}/scale"] = (d_model,)
    return found


def arrays(found, dtype, *, step=1000, slots=True, momentum=False):
    """Values for the variables and, as Adafactor keeps them, its slots."""
    values = {"global_step": np.array(step, np.int64)}
    for name, shape in found.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values[name] = (rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype)
        if not slots:
            continue
        sizes = {"_slot_v": shape}
        if len(shape) == 2 and min(shape) >= 128:
            # `vr` lacks the largest dimension, the first of two as large; `vc` lacks the other.
            largest = 0 if shape[0] >= shape[1] else 1
            sizes = {"_slot_vr": (shape[1 - largest],), "_slot_vc": (shape[largest],)}
        if momentum:
            sizes["_slot_m"] = shape
        for slot, size in sizes.items():
            # The momentum is of updates, which are small.
            scale = 1e-4 if slot == "_slot_m" else 1
            values[name + slot] = scale * np.abs(rng.normal(size=size)).astype(np.float32)
    return values


BFLOAT16 = ml_dtypes.bfloat16
FLOATS = ("float16", "float32", "float64", BFLOAT16, "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
CHECKPOINTS = {
    "small_t5": lambda: arrays(shapes(vocab=16, d_model=4, d_ff=8, d_kv=2), BFLOAT16),
    "bfloat16": lambda: arrays(shapes(), BFLOAT16),
    "per_layer": lambda: arrays(shapes(gated=False, per_layer_bias=True), np.float32),
    # Attention matrices are square here: 128 x 128.
    "factored": lambda: arrays(
        shapes(vocab=256, d_model=128, d_ff=192, d_kv=64, layers=1), BFLOAT16, momentum=True
    ),
    "decoder_only": lambda: arrays(
        tower_shapes("transformer", 16, 32, 2, 16, 2, True, False)
        | {"transformer/embedding": (64, 16), "transformer/logits/kernel": (16, 64)},
        np.float32,
        slots=False,
    ),
    "dtypes": lambda: (
        {
            f"a_{np.dtype(kind).name}": np.arange(7).astype(kind).reshape(7, 1)
            for kind in (*FLOATS, *INTEGERS, "bool")
        }
        | {"scalar": np.float32(3), "empty": np.zeros((0, 4), np.float32)}
    ),
    "partitioned": lambda: {
        "rows": np.arange(200, dtype=np.float32).reshape(100, 2),
        "columns": np.arange(18000).astype(np.uint8).reshape(2, 9000),
    },
}


def write(folder, values):
    """Writes one checkpoint with `tf.compat.v1.train.Saver`, in two data files."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        variables = []
        for number, (name, value) in enumerate(values.items()):
            with tf.device(f"/cpu:{number % 2}"):
                variables.append(v1.get_variable(name, initializer=tf.constant(value)))
        config = v1.ConfigProto(device_count={"CPU": 2})
        save(v1, graph, folder, variables, config)


def write_partitioned(folder, values):
    """Writes variables that are kept in parts, along the first or the second dimension."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        variables = [
            v1.get_variable(
                name,
                shape=value.shape,
                dtype=value.dtype,
                partitioner=tf.compat.v1.fixed_size_partitioner(3, axis=axis),
                initializer=lambda shape, dtype, partition_info, value=value: tf.constant(
                    value[
                        tuple(
                            slice(start, start + size)
                            for start, size in zip(partition_info.var_offset, shape, strict=True)
                        )
                    ]
                ),
            )
            for axis, (name, value) in enumerate(values.items())
        ]
        save(v1, graph, folder, [part for v in variables for part in v], v1.ConfigProto())


def save(v1, graph, folder, variables, config):
    """Saves variables in a session of the old kind."""
    saver = v1.train.Saver(variables, sharded="CPU" in config.device_count)
    with v1.Session(graph=graph, config=config) as session:
        session.run(v1.global_variables_initializer())
        saver.save(session, str(folder / "model.ckpt"), 1000, write_meta_graph=False)


def main():
    folder, *names = sys.argv[1:]
    for name in names or CHECKPOINTS:
        place = Path(folder, name)
        place.mkdir(parents=True)
        (write_partitioned if name == "partitioned" else write)(place, CHECKPOINTS[name]())


if __name__ == "__main__":
    main()
