"""A batched llama.cpp engine: `Engine.spawn(EngineConfig())`, `engine.submit(GenerateRequest.user("Hi."))`.

The names below are loaded on first use, so that importing one module does not load llama.cpp.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "GenerateRequest": "generation",
    "Generation": "generation",
    "Delta": "generation",
    "Finished": "generation",
    "Failed": "generation",
    "SamplingParams": "sampling",
}

__all__ = [
    "Delta",
    "Engine",
    "EngineConfig",
    "Failed",
    "Finished",
    "GenerateRequest",
    "Generation",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
