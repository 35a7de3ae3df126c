"""The dVAE that OpenAI published with DALL-E, from its parameters alone.

Its encoder and decoder are ours at another size: names, shapes and arithmetic agree, so the sizes can be
read off the tensors. See https://github.com/openai/DALL-E (`dall_e/encoder.py`, `decoder.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from limner.errors import UserError
from limner.models.dvae import DVAE, DVAEConfig

_BLOCK = re.compile(r"blocks\.group_(\d+)\.block_(\d+)\.")


def from_openai(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], size: int = 256) -> DVAE:
    """Our dVAE with the parameters of two published state dicts.

    Args:
        size: of the pictures it is used for; it works on any multiple of the stride.

    Raises:
        UserError: they are not the two halves of such a dVAE.
    """
    try:
        groups, blocks = (max(int(m[i]) for key in encoder if (m := _BLOCK.match(key))) for i in (1, 2))
        config = DVAEConfig(
            size=size,
            width=encoder["blocks.input.w"].shape[0],
            groups=groups,
            blocks=blocks,
            vocab=encoder["blocks.output.conv.w"].shape[0],
            code_width=decoder["blocks.input.w"].shape[0],
        )
    except (KeyError, ValueError, IndexError):
        raise UserError("these are not the parameters of a published dVAE: their names differ") from None
    stride = 2 ** (groups - 1)
    if groups > 16 or size % stride:
        raise UserError(f"size must be a multiple of {stride}, not {size}")
    model = config.build()
    for name, part, state in (("encoder", model.encoder, encoder), ("decoder", model.decoder, decoder)):
        own = part.state_dict()
        for key in dict.fromkeys([*own, *state]):
            if key not in own or key not in state or own[key].shape != state[key].shape:
                raise UserError(
                    f"the {name} is not of a published dVAE: {key!r} is missing, unknown or of another shape"
                )
        part.load_state_dict({key: state[key].float() for key in own})
    return model.eval()
