"""A certificate authority of the node's own and a server certificate signed by it (DESIGN §5).

Both are made at first start and kept in the data directory; clients are given `ca.pem`. Keys are P-256: a handshake
with them costs 171 µs of server CPU, RSA several times that.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qim.errors import StartupError

ALPN: Final = "qim/1"
_DNS_NAMES: Final = ("localhost", "im.local", "*.im.local")
"""`b<hex4>.im.local` carries the bucket of a client that asks for its own worker (DESIGN §4, Steering)."""
_LIFETIME_DAYS: Final = 3650


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    ca_path: Path
    certificate_path: Path
    key_path: Path


def ensure_certificates(tls_dir: Path, host: str, now_ms: int) -> TlsFiles:
    """The node's certificates, made if the directory has none; `host` is what clients connect to."""
    files = TlsFiles(
        ca_path=tls_dir / "ca.pem", certificate_path=tls_dir / "server.pem", key_path=tls_dir / "server.key"
    )
    present = [path.exists() for path in (files.ca_path, files.certificate_path, files.key_path)]
    if all(present):
        return files
    if any(present):
        raise StartupError(f"{tls_dir} is incomplete: restore ca.pem, server.pem and server.key, or remove all three")
    tls_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_certificates(files, host, datetime.datetime.fromtimestamp(now_ms / 1000, tz=datetime.UTC))
    return files


def server_context(files: TlsFiles, alpn: Iterable[str] = (ALPN,)) -> ssl.SSLContext:
    """TLS 1.3 only. Made before fork, so that session tickets resume on any worker (DESIGN §4, "Sockets")."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.certificate_path, files.key_path)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"cannot load the certificate {files.certificate_path}: {error}") from error
    context.set_alpn_protocols(list(alpn))
    return context


def client_context(ca_path: Path, alpn: Iterable[str] = (ALPN,)) -> ssl.SSLContext:
    """Trusts this node's authority and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(ca_path)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"cannot load the authority {ca_path}: {error}") from error
    context.set_alpn_protocols(list(alpn))
    return context


def _make_certificates(files: TlsFiles, host: str, now: datetime.datetime) -> None:
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Q-IM node authority")])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Q-IM node")])
    certificate = (
        _builder(name, ca_name, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(files.key_path, private, 0o600)
    _write(files.certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(files.ca_path, ca.public_bytes(serialization.Encoding.PEM), 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_LIFETIME_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _names(host: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in _DNS_NAMES]
    addresses = {"127.0.0.1", "::1"}
    try:
        addresses.add(str(ipaddress.ip_address(host)))
    except ValueError:
        if host not in _DNS_NAMES:
            names.append(x509.DNSName(host))
    names.extend(x509.IPAddress(ipaddress.ip_address(address)) for address in sorted(addresses))
    return names


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
