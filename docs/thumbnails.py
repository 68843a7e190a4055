"""Draws the thumbnails of the tutorials: `python docs/thumbnails.py [--folder F] [name ...]`.

Each runs the code of its page (three minutes for all of them, with the extras of `.[test-all]`)
and draws what that has made.
"""

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from pictures import ROOT, python_blocks

BACKGROUND, MUTED = "#1d2126", "#9aa4ad"


def draw_images(figure: Any, images: Any, n_rows: int, notes: Any = ()) -> None:
    """Draws square images in rows, each with a note in green or, where it is wrong, in red."""
    images = np.asarray(images, float)
    side = round((images[0].size) ** 0.5)
    for n, image in enumerate(images.reshape(-1, side, side)):
        axes = figure.add_subplot(n_rows, len(images) // n_rows, n + 1)
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        axes.axis("off")
        if len(notes):
            label, guess = notes[n]
            color = "#5fd07d" if label == guess else "#ff7b72"
            axes.set_title(str(guess), color=color, fontsize=13, pad=2)


def digits(page: dict[str, Any], figure: Any) -> None:
    """Images of the test, with what the model takes them for: the last column is wrong."""
    right = page["y_test"] == page["predicted"]
    rows = np.insert(np.flatnonzero(right)[:10], (5, 10), np.flatnonzero(~right)[:2])
    notes = np.stack([page["y_test"], page["predicted"]], axis=1)
    draw_images(figure, page["x_test"][rows], 2, notes[rows])


def mnist(page: dict[str, Any], figure: Any) -> None:
    """Shifted digits, as the augmentation makes them."""
    images, _ = next(page["shifted"](1))
    draw_images(figure, images[:10], 2)


def transformer(page: dict[str, Any], figure: Any) -> None:
    """What the transformer writes after 2,000 steps."""
    written = page["write"](page["checkpoint"].module(), "The function ", 200)
    lines = textwrap.wrap(" ".join(written.split()), 27)[:6]
    figure.text(
        0.05, 0.5, "\n".join(lines), color="#d6dbe0", va="center", size=13.5, family="monospace"
    )


def autoencoder(page: dict[str, Any], figure: Any) -> None:
    """Noisy digits, and the same without their noise."""
    dirty = page["dirty"][:6]
    draw_images(figure, np.clip([*dirty, *page["repair"].predict(dirty)], 0, 1), 2)


def minilm(page: dict[str, Any], figure: Any) -> None:
    """The sentences by the two directions in which their embeddings differ most."""
    embeddings = page["embeddings"] - page["embeddings"].mean(axis=0)
    _, _, directions = np.linalg.svd(embeddings, full_matrices=False)
    axes = figure.add_subplot()
    for label, name in enumerate(page["pages"]):
        points = embeddings[page["labels"] == label] @ directions[:2].T
        axes.scatter(*points.T, s=14, label=name)
    axes.axis("off")
    axes.legend(labelcolor=MUTED, frameon=False, loc="center left", bbox_to_anchor=(0.98, 0.5))


def gan(page: dict[str, Any], figure: Any) -> None:
    """Real digits, and below them some that the generator draws."""
    noise = np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32)
    drawn = page["checkpoint"].module()["painter"](noise)
    draw_images(figure, [*page["x"][:6], *np.asarray(drawn)], 2)


TUTORIALS = (digits, mnist, transformer, autoencoder, minilm, gan)


def main(arguments: list[str] | None = None) -> None:
    """Draws the thumbnails with these names, or all."""
    names = [each.__name__ for each in TUTORIALS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*names, []])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "_static")
    chosen = parser.parse_args(arguments)
    sys.path.append(str(ROOT / "examples" / "models"))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for draw in TUTORIALS:
        if chosen.names and draw.__name__ not in chosen.names:
            continue
        page: dict[str, Any] = {"__name__": "__main__"}
        for block in python_blocks(f"docs/tutorials/{draw.__name__}.md"):
            exec(re.sub(r"(n_steps = .*), 60$", r"\1, 2000", block, flags=re.M), page)
        figure = plt.figure(figsize=(3.2, 1.6), facecolor=BACKGROUND, layout="constrained")
        draw(page, figure)
        figure.savefig(chosen.folder / f"tutorial-{draw.__name__}.png", dpi=150)


if __name__ == "__main__":
    main()
