"""Signatures by C2PA, the standard of content credentials: who drew a picture, with what, and that nobody changed it.

    sign = Signer(Path("chain.pem"), Path("key.pem"))
    signed = sign(drawing.png(), "png", drawing)

The signature covers the statement that a trained model created the picture, and the pixels.
"""

from __future__ import annotations

import io
from pathlib import Path

import c2pa
from PIL import Image

from limner.drawing import SOURCE_TYPE, Drawing, ImageKind
from limner.errors import UserError, escape_control
from limner.json_files import parse_json
from limner.version import __version__

__all__ = ["Signer"]

_ALGORITHMS = ("es256", "es384", "es512", "ps256", "ps384", "ps512", "ed25519")
_MAX_PEM_BYTES = 1 << 20


class Signer:
    """Signs files of drawings with a private key.

    Args:
        certificates: PEM file, the certificate of the key first, then those of its issuers.
        key: PEM file of the private key, in PKCS #8 without a password.

    Raises:
        UserError: a file cannot be read, or files signed with it would not be valid.
    """

    def __init__(self, certificates: Path, key: Path) -> None:
        pems = [_read(path) for path in (certificates, key)]
        problems = list[str]()
        for algorithm in _ALGORITHMS:
            self._info = c2pa.C2paSignerInfo(algorithm, pems[0], pems[1], None)
            try:
                problem = self._problem()
            except c2pa.C2paError as error:
                problem = " ".join(str(error).split())
            if problem is None:
                return
            problems.append(problem)
        problem = next((text for text in problems if "private key" not in text), problems[0])
        raise UserError(
            f"{escape_control(str(key))} cannot sign with the certificate in {escape_control(str(certificates))} "
            f"({escape_control(problem)}): give a PKCS #8 key and the chain of a certificate for signing"
        )

    def __call__(self, data: bytes, kind: ImageKind, drawing: Drawing) -> bytes:
        """Return a file with the signature of its contents. Safe to call from several threads."""
        action = {
            "action": "c2pa.created", "digitalSourceType": SOURCE_TYPE,
            "softwareAgent": {"name": f"limner, model {drawing.model}", "version": __version__},
        }  # fmt: skip
        manifest = {
            "claim_generator_info": [{"name": "limner", "version": __version__}],
            "title": escape_control(drawing.caption),
            "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [action]}}],
        }
        signed = io.BytesIO()
        with c2pa.Signer.from_info(self._info) as signer, c2pa.Builder(manifest) as builder:
            builder.sign(signer, f"image/{kind}", io.BytesIO(data), signed)
        return signed.getvalue()

    def _problem(self) -> str | None:
        """Sign a small picture. Return why the signature is not valid; None if it is.

        A certificate may be of an issuer that this machine does not know.
        """
        drawing = Drawing(image=Image.new("RGB", (8, 8)), caption="test", score=0, seed=0, candidate=1, model="test")
        with c2pa.Reader("image/png", io.BytesIO(self(drawing.png(), "png", drawing))) as reader:
            found = parse_json(reader.json())
        codes = {status["code"] for status in found.get("validation_status", ())} - {"signingCredential.untrusted"}
        return ", ".join(sorted(codes)) or None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {escape_control(str(path))}: {error.strerror}") from None
