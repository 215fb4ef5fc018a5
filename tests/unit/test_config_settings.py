import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_config import ConfigError, ModelNotFoundError, Settings, load_settings, resolve_model, served_name
from baton_config.render import options, to_toml
from baton_config.settings import merge, parse_assignment


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults_listen_on_loopback_only():
    settings = load_settings()
    assert (settings.gateway.http, settings.gateway.grpc) == ("127.0.0.1:8000", "127.0.0.1:50051")
    assert (settings.model.name, settings.model.dtype, settings.decode.page_size) == ("smollm2", "float32", 16)
    assert settings.registry_target == settings.gateway.registry
    assert settings.agent.socket.startswith("unix:/")


def test_flags_before_environment_before_file_before_defaults(tmp_path, monkeypatch):
    file = tmp_path / "cluster.toml"
    file.write_text('[gateway]\nhttp = "file:1"\ngrpc = "file:2"\nregistry = "file:3"\n')
    monkeypatch.setenv("BATON_GATEWAY__HTTP", "env:1")
    monkeypatch.setenv("BATON_GATEWAY__GRPC", "env:2")
    gateway = load_settings({"gateway": {"http": "flag:1"}}, file).gateway
    assert (gateway.http, gateway.grpc, gateway.registry) == ("flag:1", "env:2", "file:3")
    assert gateway.max_requests == 1024


def test_the_file_is_found_by_variable_then_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "baton.toml").write_text('[model]\nname = "here"\n')
    assert load_settings().model.name == "here"
    (tmp_path / "other.toml").write_text('[model]\nname = "other"\n')
    monkeypatch.setenv("BATON_CONFIG", str(tmp_path / "other.toml"))
    assert load_settings().model.name == "other"
    monkeypatch.setenv("BATON_CONFIG", "missing.toml")
    with pytest.raises(ConfigError, match="no such file"):
        load_settings()


def test_a_misspelt_variable_is_told_and_those_of_others_are_not(monkeypatch):
    monkeypatch.setenv("BATON_GATEWAY_PORT", "tcp://10.0.0.1:50051")  # as Kubernetes sets it
    monkeypatch.setenv("batonne__kv_bytes", "1")
    load_settings()
    monkeypatch.setenv("BATON_DECODE__KV_BYTE", "64MiB")
    with pytest.raises(ConfigError, match=r"decode\.kv_byte: there is no such option"):
        load_settings()
    monkeypatch.setenv("BATON_DECOD__KV_BYTES", "64MiB")
    with pytest.raises(ConfigError, match="BATON_DECOD__KV_BYTES: there is no such section; there are model, cluster"):
        load_settings()


def test_texts_for_sizes_and_cpus(monkeypatch):
    monkeypatch.setenv("BATON_DECODE__KV_BYTES", "64MiB")
    monkeypatch.setenv("BATON_DECODE__CPUS", "0,2-4")
    decode = load_settings().decode
    assert (decode.kv_bytes, decode.cpus) == (64 << 20, (0, 2, 3, 4))
    assert load_settings({"decode": {"cpus": [1]}}).decode.cpus == (1,)
    with pytest.raises(ConfigError, match="not a list of CPUs"):
        load_settings({"decode": {"cpus": "first"}})


def test_domains_by_device(monkeypatch):
    monkeypatch.setenv("BATON_AGENT__DOMAINS", "0000:1b:00.0=mlx5_0+mlx5_1, host=10.0.0.1, mlx5_2")
    assert load_settings().agent.domains_by_device == {
        "0000:1b:00.0": ("mlx5_0", "mlx5_1"),
        "host": ("10.0.0.1",),
        "*": ("mlx5_2",),
    }
    settings = load_settings({"agent": {"domains": ["127.0.0.1", "127.0.0.2"]}})
    assert settings.agent.domains_by_device == {"*": ("127.0.0.1", "127.0.0.2")}
    for wrong in ("0=", "=mlx5_0", "0=mlx5_0+"):
        with pytest.raises(ConfigError, match="not of the form"):
            load_settings({"agent": {"domains": wrong}})


def test_options_of_a_fabric_provider(monkeypatch):
    monkeypatch.setenv("BATON_AGENT__PROVIDER_OPTIONS", "FI_VERBS_TX_SIZE=512, FI_EFA_IFACE=rdmap0s6")
    assert load_settings().agent.provider_options == ("FI_VERBS_TX_SIZE=512", "FI_EFA_IFACE=rdmap0s6")
    assert load_settings({"agent": {"provider_options": ["FI_X=a=b"]}}).agent.provider_options == ("FI_X=a=b",)
    for wrong in ("FI_VERBS_TX_SIZE", "LD_PRELOAD=x"):
        with pytest.raises(ConfigError, match="not an option such as"):
            load_settings({"agent": {"provider_options": wrong}})


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"gateway": {"htpp": "x"}}, "gateway.htpp"),
        ({"gatway": {}}, "gatway"),
        ({"model": {"dtype": "float8"}}, "model.dtype"),
        ({"prefill": {"page_size": 0}}, "prefill.page_size"),
        ({"tls": {"key": "key.pem"}}, "tls"),
    ],
)
def test_every_mistake_is_named(flags, where):
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    assert [problem.where for problem in caught.value.problems] == [where]


def test_an_option_that_does_not_exist_is_called_that():
    with pytest.raises(ConfigError, match=r"decode\.data_paralel: there is no such option; `baton config --docs`"):
        load_settings({"decode": {"data_paralel": 2}})


def test_a_file_that_is_no_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("[gateway\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_settings(file=file)


def test_a_section_given_as_text(monkeypatch):
    monkeypatch.setenv("BATON_MODEL", "smollm2")
    with pytest.raises(ConfigError, match="model"):
        load_settings()


@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
    cpus=st.lists(st.integers(0, 500)),
    timeout=st.floats(1e-3, 1e9),
    size=st.integers(0, 2**50),
    spin=st.booleans(),
)
def test_a_printed_configuration_reads_back_the_same(tmp_path_factory, *, name, cpus, timeout, size, spin):
    flags = {"model": {"name": name}, "agent": {"spin": spin, "cpus": cpus, "post_timeout_s": timeout}}
    settings = load_settings(flags | {"prefill": {"kv_bytes": size}})
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_text(to_toml(settings))
    assert load_settings(file=file) == settings


def test_every_option_is_documented_and_set_by_its_variable(monkeypatch):
    listed = list(options())
    assert len({option.path for option in listed}) == len(listed) > 50
    for option in listed:
        assert option.description, option.path
        assert option.kind, option.path
    http = next(option for option in listed if option.path == "gateway.http")
    monkeypatch.setenv(http.variable, "127.0.0.1:1")
    assert Settings().gateway.http == "127.0.0.1:1"


def test_assignments_and_layers():
    assert parse_assignment("gateway.http = 127.0.0.1:1") == {"gateway": {"http": "127.0.0.1:1"}}
    merged = merge({"gateway": {"http": "a", "grpc": None}}, {"gateway": {"http": "b"}, "model": {"name": None}})
    assert merged == {"gateway": {"http": "b"}}
    for wrong in ("gateway.http", "http=1", "gateway.=1"):
        with pytest.raises(ConfigError, match=r"section\.option=value"):
            parse_assignment(wrong)


def test_models(tmp_path):
    assert resolve_model("smollm2").suffix == ".gguf"
    assert served_name("smollm2") == "SmolLM2-135M-Instruct"
    assert served_name("smollm2", "ours") == "ours"
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "hf").mkdir()
    assert resolve_model(str(tmp_path / "tiny.gguf")) == tmp_path / "tiny.gguf"
    assert served_name(str(tmp_path / "tiny.gguf")) == "tiny"
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").touch()
    assert resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"
    (tmp_path / "model.bin").touch()
    for wrong in ("model.bin", "smollm3"):
        with pytest.raises(ModelNotFoundError):
            resolve_model(wrong)
