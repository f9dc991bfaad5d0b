"""The sections `engine` and `engine.sglang`."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt, Section
from streamrl.config.registry import ENGINES, EngineKind, EngineName


class SglangConfig(Section, frozen=True, kw_only=True):
    """SGLang servers (engine.kind = "sglang"): each engine starts one on loopback and watches it. Tried with SGLang 0.5.17 and 0.5.23."""

    python: str = ""
    """Interpreter of the environment that SGLang is installed in; empty: the one that runs streamrl."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs for the engines, `tensor_parallel` for each in turn; empty: those the engine sees, from the first on."""
    swap: Literal["auto", "flip", "copy", "copy_pinned", "pause"] = "auto"
    """How a version gets in. `flip`: two sets of weights and of graphs, no pause. `copy`: over the served weights between two forward
    passes, from a second set on the GPU. `copy_pinned`: from the host's memory. `pause`: SGLang's own update in a pause, whose versions
    are not exact for every token. `auto`: the first of them that the model and the memory allow."""
    max_gap_ms: NonNegativeFloat = 0.5
    """Staging is paced so that it delays a forward pass by at most about this; 0: as fast as it goes."""
    isolate_prefixes: bool = True
    """A prompt reuses cached prefixes of the version it begins with only, not those that older weights computed."""
    verify: bool = True
    """Check each staged version on the engine's device against its manifest's digest."""
    grammar_backend: Literal["", "xgrammar", "llguidance", "outlines"] = ""
    """What keeps completions within `sampling.json_schema` and `sampling.regex`; its package must be in SGLang's environment. Empty: none,
    requests with a grammar are refused, and the server needs no tokenizer."""
    flags: dict[str, Any] = {}
    """Any other flag of SGLang's launch_server, as `mem_fraction_static = 0.8`; true gives `--flag`, false leaves it out."""
    env: dict[str, str] = {}
    """Environment variables of the server; no secrets, the configuration is stored with the run."""
    quick_start: bool = True
    """Import SGLang in all of a server's processes at the same time, and of its models the one that is served; false: SGLang imports its
    server first, then its other processes, and all models that it knows."""
    start_timeout_s: PositiveFloat = 900.0
    """Time a server gets until it answers; the first start of a model on a GPU compiles kernels for minutes."""
    restarts: NonNegativeInt = 3
    """Times an engine worker starts a new server for one that died, before it ends (and is restarted by its own supervisor)."""
    record_forwards: bool = False
    """Keep the time of every forward pass for `streamrl bench weights`."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Generation engines started with the run."""

    kind: EngineName = "local"
    """`local`: a transformers model in this package's engine. `table`: a tabular policy without any framework. `sglang`: SGLang servers."""
    workers: NonNegativeInt = 1
    """Engine processes."""
    slots: PositiveInt = 128
    """Sequences decoded at once."""
    threads: PositiveInt = 1
    """CPU threads of one engine."""
    deterministic: bool = False
    """Tokens depend on seed, prompt and weights only, not on what else is being decoded (slower)."""
    host: str = "127.0.0.1"
    """Address the HTTP server listens on; 0.0.0.0: every one of its host."""
    advertise: str = ""
    """Host name or address that producers reach the engines at; empty: engine.host, or this host's address on the way to the bus."""
    port: Port = 0
    """Port of the first engine; 0: any free one."""
    sglang: SglangConfig = SglangConfig()

    @property
    def traits(self) -> EngineKind:
        """What is known of this kind of engine: nobody else asks for it by name."""
        return ENGINES[self.kind]
