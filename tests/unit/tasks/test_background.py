"""The scene parser rejects backgrounds outside the palette."""

import numpy as np

from limner.tasks import rendering, scene_reader, verify
from limner.tasks.scenes import COLORS, Scene, SceneObject


def test_unknown_backgrounds():
    circle = SceneObject(shape="circle", color="red", size="large", fill="solid", x=3, y=3)
    for paint in ((140, 50, 170), (20, 20, 20), (0, 255, 255)):
        picture = np.empty((48, 48, 3), np.uint8)
        picture[:] = paint
        alpha = rendering.alpha_mask("circle", "large", "solid", 4)[..., None]
        picture[12:32, 12:32] = alpha * COLORS["red"] + (1 - alpha) * picture[12:32, 12:32]
        assert scene_reader.read(picture).scene is None
        assert not verify.satisfies(picture, "a large red circle")
    assert verify.satisfies(rendering.render(Scene(objects=(circle,), background="teal")), "a large red circle")
