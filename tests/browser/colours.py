"""Pictures as people with a colour vision deficiency see them, to be looked at.

    python tests/browser/colours.py tests/browser/artefacts/lab-2-rollback.png ...

Writes NAME-protan.png, NAME-deutan.png, NAME-tritan.png and a sheet of all four beside each picture. The matrices are
those of Machado, Oliveira and Fernandes (2009) for a complete deficiency, applied in linear light.
"""
import sys
from pathlib import Path

import numpy as np
from PIL import Image

MATRICES = dict(protan=((.152286, 1.052583, -.204868), (.114503, .786281, .099216), (-.003882, -.048116, 1.051998)),
                deutan=((.367322, .860646, -.227968), (.280085, .672501, .047413), (-.011820, .042940, .968881)),
                tritan=((1.255528, -.076749, -.178779), (-.078411, .930809, .147602), (.004733, .691367, .303900)))


def simulate(rgb, kind):
    "(H, W, 3) uint8 as seen with one kind of deficiency."
    x = rgb / 255.
    linear = np.where(x <= .04045, x / 12.92, ((x + .055) / 1.055) ** 2.4)
    y = np.clip(linear @ np.array(MATRICES[kind]).T, 0, 1)
    return np.round(255 * np.where(y <= .0031308, 12.92 * y, 1.055 * y ** (1 / 2.4) - .055)).astype(np.uint8)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        rgb = np.asarray(Image.open(path).convert("RGB"))
        seen = [rgb] + [simulate(rgb, k) for k in MATRICES]
        for kind, picture in zip(MATRICES, seen[1:]):
            Image.fromarray(picture).save(path.with_name(f"{path.stem}-{kind}.png"))
        Image.fromarray(np.vstack([np.hstack(seen[:2]),
                                   np.hstack(seen[2:])])).save(path.with_name(f"{path.stem}-sheet.png"))
        print(path.with_name(f"{path.stem}-sheet.png"))
