"""Projector: tables of embeddings for the projector of TensorBoard."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flaxfit.callbacks._loggers import replace_text
from flaxfit.tree import ArrayLike, PyTree, flat, whole_number

Metadata: TypeAlias = str | os.PathLike[str] | Sequence[str]
"""A file name in the event folder, or a label for each row."""


class Projector:
    """Writes the tables of embedding layers as text, and their list, `projector_config.pbtxt`."""

    def __init__(self, every: int, metadata: Metadata | Mapping[str, Metadata] | None):
        self.every = whole_number("embeddings_freq", every, least=0)
        """The number of checkpoints between writes; 0: never write."""
        if metadata and not self.every:
            raise ValueError("embeddings_metadata needs embeddings_freq: its tables are written.")
        self._metadata = metadata or {}

    def tables(self, params: PyTree) -> dict[str, ArrayLike]:
        """Returns the tables by path of the layer; a model that is one layer has "embedding"."""
        return {
            path.removesuffix("/embedding"): leaf
            for path, leaf in flat(params).items()
            if path.split("/")[-1] == "embedding" and np.ndim(leaf) == 2
        }

    def check(self, folder: Path, params: PyTree) -> None:
        """Checks that there are tables, and a label for each row.

        A label file is read if it already exists in the event folder.
        """
        tables = self.tables(params)
        if not tables:
            raise ValueError(
                f"embeddings_freq={self.every} needs an Embed layer: this model has no parameter "
                "'embedding' of shape (rows, features)."
            )
        if isinstance(self._metadata, Mapping) and (unknown := self._metadata.keys() - tables):
            raise ValueError(
                f"embeddings_metadata names {', '.join(sorted(map(repr, unknown)))}, but the Embed "
                f"layers are {', '.join(map(repr, tables))}."
            )
        for name, table in tables.items():
            self._check_labels(folder, name, np.shape(table)[0])

    def write(self, folder: Path, tables: Mapping[str, np.ndarray]) -> None:
        """Writes tables to an event folder, replacing earlier ones."""
        config = ""
        for name, table in tables.items():
            self._check_labels(folder, name, len(table))
            labels = self._labels(name)
            fields = {"tensor_name": name, "tensor_path": f"embeddings/{name}.tsv"}
            rows = ("\t".join(f"{value:.7g}" for value in row) for row in table.tolist())
            replace_text(folder / fields["tensor_path"], "".join(f"{row}\n" for row in rows))
            if isinstance(labels, str | os.PathLike):
                fields["metadata_path"] = os.fspath(labels)
            elif labels is not None:
                fields["metadata_path"] = f"embeddings/{name}.labels.tsv"
                lines = (" ".join(str(label).split()) or "''" for label in labels)
                replace_text(
                    folder / fields["metadata_path"], "".join(f"{line}\n" for line in lines)
                )
            quoted = (f"  {key}: {json.dumps(text)}\n" for key, text in fields.items())
            config += f"embeddings {{\n{''.join(quoted)}}}\n"
        replace_text(folder / "projector_config.pbtxt", config)

    def _labels(self, name: str) -> Metadata | None:
        return self._metadata.get(name) if isinstance(self._metadata, Mapping) else self._metadata

    def _check_labels(self, folder: Path, name: str, n_rows: int) -> None:
        labels, where = self._labels(name), ""
        if isinstance(labels, str | os.PathLike):
            path = folder / Path(labels).expanduser()
            n_labels, where = _n_labels(path) if path.is_file() else n_rows, f": {path}"
        else:
            n_labels = n_rows if labels is None else len(labels)
        if n_labels != n_rows:
            raise ValueError(
                f"embeddings_metadata has {n_labels:,} labels for the {n_rows:,} rows of "
                f"{name!r}{where}."
            )


def _n_labels(path: Path) -> int:
    """Counts the labels in a file as TensorBoard does.

    Blank lines do not count, and a first line with a tab is a header.
    """
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        has_names = b"\t" in next(lines, b"\t")
        return sum(1 for _ in lines) + (not has_names)
