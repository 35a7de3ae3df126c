"""Draw a caption with the bundled model, the best of 16 first.

python examples/draw.py "two large striped green circles on a pink background" circles
"""

import sys

import limner

caption, name = sys.argv[1:]
pipe = limner.load()
for number, drawing in enumerate(pipe(caption, n=2, candidates=16, seed=0), 1):
    drawing.save(f"{name}-{number}.png")
    print(f"{name}-{number}.png: score {drawing.score:.3f}")
