"""Train on a folder of pictures and .txt captions, from Python, and draw one of its captions.

python examples/train_on_a_folder.py photos/ runs/photos 3000

The last number is how many steps each model trains; the recipe `emoji` has 3,000, 4,000 and 400. After an interruption
the same call continues.
"""

import sys
from dataclasses import replace

import limner
from limner import recipes
from limner.data.open_source import open_source
from limner.runs.train import train_all

folder, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


def shorter(stage):
    """The stage with so many steps, and with batches that a small folder fills."""
    return replace(stage, training=replace(stage.training, steps=steps, batch_size=min(32, stage.training.batch_size)))


recipe = recipes.get("emoji")
recipe = replace(
    recipe, dvae=shorter(recipe.dvae), prior=shorter(recipe.prior), contrastive=shorter(recipe.contrastive)
)
train_all(recipe, folder, out)
caption = open_source(folder)[0].captions[0]
limner.load(out)(caption, n=1, candidates=4)[0].save(f"{out}/drawing.png")
print(f"{out}/drawing.png: {caption}")
