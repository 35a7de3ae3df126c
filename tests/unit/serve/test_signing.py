"""Signed files are valid, say that a model drew them, and show a change; keys that do not fit raise UserError."""

import base64
import datetime
import io
import json

import c2pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fastapi.testclient import TestClient
from PIL import Image

from limner.drawing import SOURCE_TYPE, Drawing, xmp_packet
from limner.errors import UserError
from limner.serve.app import create_app
from limner.serve.signing import Signer
from tiny import tiny_pipe

DRAWING = Drawing(
    image=Image.new("RGB", (24, 24), "red"), caption="a \x1b red <circle>", score=0, seed=1, candidate=1, model="tiny"
)
KEYS = {
    "es256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "es384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ps256": lambda: rsa.generate_private_key(65_537, 2_048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


def certificate(name, key, issuer, issuer_key, usage):
    """A certificate for signing documents, or of an issuer."""

    def named(text):
        return x509.Name(
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test"), x509.NameAttribute(NameOID.COMMON_NAME, text)]
        )

    now, is_issuer = datetime.datetime.now(datetime.UTC), usage is None
    builder = (
        x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=is_issuer, path_length=None), True)
        .add_extension(x509.KeyUsage(not is_issuer, *[False] * 4, is_issuer, *[False] * 3), True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )  # fmt: skip
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def write(folder, kind="es256", usage=ExtendedKeyUsageOID.EMAIL_PROTECTION):
    """Write a chain and a key; return their paths."""
    issuer_key, key = KEYS["es256"](), KEYS[kind]()
    chain = certificate("signer", key, "root", issuer_key, usage) + certificate(
        "root", issuer_key, "root", issuer_key, None
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = folder / "chain.pem", folder / "key.pem"
    for path, data in zip(paths, (chain, pem), strict=True):
        path.write_bytes(data)
    return paths


def manifest(data, kind="png"):
    """The state of a file's signature, and its manifest."""
    with c2pa.Reader(f"image/{kind}", io.BytesIO(data)) as reader:
        found = json.loads(reader.json())
    return found["validation_state"], found["manifests"][found["active_manifest"]]


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_key_of_each_kind_signs(algorithm, tmp_path):
    sign = Signer(*write(tmp_path, algorithm))
    state, found = manifest(sign(DRAWING.png(), "png", DRAWING))
    assert state == "Valid" and found["signature_info"]["alg"].lower() == algorithm


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_a_signed_file_says_who_drew_it_and_shows_a_change(kind, tmp_path):
    data = DRAWING.file(kind)
    signed = Signer(*write(tmp_path))(data, kind, DRAWING)
    state, found = manifest(signed, kind)
    (action,) = found["assertions"][0]["data"]["actions"]
    assert state == "Valid" and found["title"] == r"a \x1b red <circle>"
    assert action["action"] == "c2pa.created" and action["digitalSourceType"] == SOURCE_TYPE
    assert "tiny" in action["softwareAgent"]["name"]
    before, after = (Image.open(io.BytesIO(file)) for file in (data, signed))
    assert before.tobytes() == after.tobytes()
    assert all(xmp_packet(r"a \x1b red <circle>", "tiny").encode() in file for file in (data, signed))
    at = signed.rindex(b"trainedAlgorithmicMedia", 0, signed.index(b"xpacket end"))  # in the XMP packet
    assert manifest(signed[:at] + b"T" + signed[at + 1 :], kind)[0] == "Invalid"


def test_the_server_signs_finished_pictures(tmp_path):
    app = create_app({"tiny": tiny_pipe()}, sign=Signer(*write(tmp_path)))
    with TestClient(app, base_url="http://localhost") as client:
        body = {"prompt": "a red circle", "n": 2, "candidates": 2, "output_format": "webp"}
        sent = client.post("/v1/images/generations", json=body).json()["data"]
    found = [manifest(base64.b64decode(picture["b64_json"]), "webp") for picture in sent]
    assert [state for state, _ in found] == ["Valid"] * 2 and found[0][1]["title"] == "a red circle"


def test_keys_that_do_not_fit_are_refused(tmp_path):
    for name in ("one", "other", "server"):
        (tmp_path / name).mkdir()
    chain, key = write(tmp_path / "one")
    other = write(tmp_path / "other")[1]
    wrong = write(tmp_path / "server", usage=ExtendedKeyUsageOID.SERVER_AUTH)
    for paths in ((chain, other), (key, chain), (chain, chain), wrong):
        with pytest.raises(UserError, match=r"cannot sign with the certificate .*: give a PKCS #8 key"):
            Signer(*paths)
    with pytest.raises(UserError, match="cannot read .*none: No such file"):
        Signer(tmp_path / "none", key)
