"""Where the HTTP API may listen, and how it is protected there."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from baton_gateway.http_server import HttpServer
from baton_rpc import AddressError, BindError, InsecureAddressError, TlsFiles

APP = PlainTextResponse("here")
# The loopback interface by a name that is not trusted to be it.
BEYOND = "127.1:0"


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30)


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    """An authority, and a certificate of it for both ends."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(tmp_path, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    _openssl(tmp_path, "req", *key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=gateway")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    _openssl(tmp_path, "x509", "-req", "-in", "request.pem", *signing, "-out", "certificate.pem")
    return TlsFiles(tmp_path / "certificate.pem", tmp_path / "key.pem", tmp_path / "ca.pem")


async def test_beyond_loopback_it_is_https_and_clients_show_a_certificate(tls: TlsFiles) -> None:
    server = HttpServer(APP, BEYOND, tls=tls)
    await server.start()
    try:
        url = f"https://127.0.0.1:{server.address.rpartition(':')[2]}"
        stranger = ssl.create_default_context(cafile=tls.authority)
        async with httpx.AsyncClient(verify=stranger) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url)
        known = ssl.create_default_context(cafile=tls.authority)
        known.load_cert_chain(tls.certificate, tls.key)
        async with httpx.AsyncClient(verify=known) as client:
            assert (await client.get(url)).text == "here"
    finally:
        await server.stop()


async def test_on_loopback_it_is_plain(tls: TlsFiles) -> None:
    server = HttpServer(APP, "127.0.0.1:0", tls=tls)
    await server.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://{server.address}")).text == "here"
    await server.stop()
    await server.stop()


async def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    server = HttpServer(APP, f"unix:{path}")
    await server.start()
    assert os.stat(path).st_mode & 0o777 == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
        assert (await client.get("http://gateway")).text == "here"
    await server.stop()
    assert not path.exists()


async def test_addresses_that_are_refused() -> None:
    with pytest.raises(InsecureAddressError):
        HttpServer(APP, BEYOND)
    with pytest.raises(AddressError):
        HttpServer(APP, "nonsense")
    first = HttpServer(APP, BEYOND, allow_insecure=True)
    await first.start()
    second = HttpServer(APP, f"127.0.0.1:{first.address.rpartition(':')[2]}")
    with pytest.raises(BindError, match=r"127\.0\.0\.1"):
        await second.start()
    await second.stop()
    await first.stop()
