"""A certificate for the embedded server, signed by an authority of the run whose key is thrown away once it has signed.

Clients get the authority's certificate with their credentials and trust nothing else, so no authority of the system is involved.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.errors import LaunchError
from streamrl.system import write_private

if TYPE_CHECKING:
    from cryptography import x509

VALID_DAYS = 825
RENEW_DAYS = 30
"""A certificate with less time left than this is made anew when the run is started."""


class Certificate(msgspec.Struct, frozen=True):
    """Files of a server's certificate and its key, and the PEM text of the authority that clients verify it with."""

    path: Path
    key_path: Path
    authority: str


def certificate_for(directory: Path, hosts: Sequence[str]) -> Certificate:
    """The certificate in `directory` if it covers `hosts` for a while yet, else a new one.

    Args:
        directory: gets `ca.pem`, `server.pem` and, with mode 0600, `server.key`.
        hosts: names and addresses at which clients reach the server.

    Raises:
        LaunchError: the package `cryptography` is missing, or the directory cannot be written.
    """
    made = Certificate(directory / "server.pem", directory / "server.key", "")
    authority = directory / "ca.pem"
    try:
        if not _covers(made.path, made.key_path, authority, hosts):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            certificate, key, signer = _make(hosts)
            write_private(made.key_path, key)
            write_private(made.path, certificate)
            write_private(authority, signer)
        return msgspec.structs.replace(made, authority=authority.read_text())
    except ImportError as error:
        raise LaunchError(
            f"a certificate for {', '.join(hosts)} needs the package cryptography: {error}", hint="pip install cryptography"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"the certificate in {directory} cannot be written: {error.strerror}",
            hint="is the run directory yours, and the disk not full?",
            path=str(directory),
        ) from error


def _covers(path: Path, key_path: Path, authority: Path, hosts: Sequence[str]) -> bool:
    from cryptography import x509

    if not (path.is_file() and key_path.is_file() and authority.is_file()):
        return False
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    known = {str(name.value) for name in names}
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return known >= set(hosts) and left > datetime.timedelta(days=RENEW_DAYS)


def _make(hosts: Sequence[str]) -> tuple[bytes, bytes, bytes]:
    """PEM of a server certificate, its key, and the authority's certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    signer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    signer_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "streamrl run authority")])

    def begin(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(signer_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            # Clocks of hosts differ.
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False)
        )

    authority = (
        begin(signer_name, signer_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(signer_key, hashes.SHA256())
    )
    certificate = (
        begin(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "streamrl bus")]), key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), secret, authority.public_bytes(pem)


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
