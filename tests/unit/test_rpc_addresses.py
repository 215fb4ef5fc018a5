import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_rpc import AddressError, TcpAddress, TlsError, TlsFiles, UnixAddress, advertised_address, parse_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:8000", TcpAddress("127.0.0.1", 8000)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("[::1]:50051", TcpAddress("::1", 50051)),
        ("unix:/run/a.sock", UnixAddress("/run/a.sock")),
        ("unix:///run/a.sock", UnixAddress("/run/a.sock")),
        ("unix:a.sock", UnixAddress("a.sock")),
    ],
)
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "8000", ":8000", "host:", "host:x", "host:65536", "::1:50051", "unix:", "unix:/" + "a" * 107, "h:-1"]
)
def test_what_is_no_address(text):
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert caught.value.fields == {"address": text}


@given(st.ip_addresses(), st.integers(0, 65535))
def test_printing_and_parsing_agree(ip, port):
    address = TcpAddress(str(ip), port)
    assert parse_address(str(address)) == address
    assert address.loopback == ip.is_loopback


def test_missing_tls_files_are_named(tmp_path):
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    with pytest.raises(TlsError, match=r"tls\.certificate .*cert\.pem"):
        files.server_credentials()


def test_what_others_are_told():
    assert advertised_address("127.0.0.1:9", None) == "127.0.0.1:9"
    assert advertised_address("0.0.0.0:9", "node-7") == "node-7:9"
    assert advertised_address("unix:/run/a.sock", "node-7") == "unix:/run/a.sock"
    with pytest.raises(AddressError, match="advertise_host"):
        advertised_address("[::]:9", None)
