"""The one place where megatron-core is imported: a decoder of `GPTModel` under tensor, sequence and pipeline parallelism.

Letters: `L` positions of a row, `R` rows, `H` hidden size, `N` heads, `K` heads of keys and values, `D` size of a head; N and K of
one tensor rank. Between layers a rank has L / tensor ranks positions (sequence parallel), within attention all of them.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.errors import ConfigError
from streamrl.models.megatron.names import Architecture, Place
from streamrl.trainers.megatron.buildable import check_installed
from streamrl.trainers.torch.layers import CHECKPOINT

_alone = False
"""Whether the default group was made here, of this process alone."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([R, N, L, D] queries, [R, K, L, D] keys, values) to [R, L, N, D]."""
MakeMixture = Callable[[], torch.nn.Module]
"""What stands in the place of a layer's MLP: [L, R, H] to the same and no bias."""


class CoreAttention(torch.nn.Module):
    """Attention as `Rows` says: megatron-core's own, without Transformer Engine, knows neither packed rows nor masks of several samples."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.rows: Rows | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[L, R, N, D] queries, [L, R, K, D] keys and values to [L, R, N * D]."""
        assert self.rows is not None and self.rows.attend is not None
        found = self.rows.attend(*(each.permute(1, 2, 0, 3) for each in (query, key, value)))
        return found.transpose(0, 1).flatten(2)


class Absent(torch.nn.Module):
    """Holds the place of an MLP."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Rows:
    """How the rows of the pass that is being made attend."""

    attend: Attend | None = None


class RMSNorm(torch.nn.Module):
    """By float32 squares, as transformers' models have it; megatron-core's local norm refuses sequence parallelism."""

    def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """The same shape and type."""
        wide = states if states.dtype == torch.float64 else states.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(states.dtype)


class Decoder:
    """A stage of a `GPTModel` without its output layer's product: states come out, and the last one hands over the head's rows.

    Args:
        arch: of the whole model.
        eps: of its norms.
        place: of this rank: the first `tensors` ranks are one group, those of the next stage another, and replicas follow.
        dtype: of its parameters, which are not initialised.
        device: where they lie.
        timeout_s: longest that a rank waits for another; None: another decoder of the same place has made the groups.
        mixture: makes a layer's mixture of experts; None: the layers are dense.
        headless: make no output layer.

    Raises:
        ConfigError: megatron-core is not there.
    """

    def __init__(
        self,
        arch: Architecture,
        eps: float,
        *,
        place: Place,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float | None,
        mixture: MakeMixture | None,
        headless: bool = False,
    ) -> None:
        check_installed()
        stand_in()
        core = imported()
        if timeout_s is not None:
            _begin(core, place, device, timeout_s)
        self.first, self.last = place.stage == 0, place.stage == place.stages - 1
        silu = torch.nn.functional.silu
        self._core = core
        self.config: Any = core.TransformerConfig(
            num_layers=arch.layers,
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            num_query_groups=arch.kv_heads,
            kv_channels=arch.head_dim,
            ffn_hidden_size=arch.intermediate,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            tensor_model_parallel_size=place.tensors,
            pipeline_model_parallel_size=place.stages,
            sequence_parallel=place.tensors > 1,
            use_cpu_initialization=device.type == "cpu",
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=device.type == "cuda",
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            add_qkv_bias=arch.qkv_bias,
            normalization="RMSNorm",
            qk_layernorm=arch.qk_norm,
            layernorm_epsilon=eps,
        )
        self.module: Any = core.GPTModel(
            config=self.config,
            transformer_layer_spec=_spec(core, arch),
            vocab_size=-(-arch.vocabulary // place.tensors) * place.tensors,
            max_sequence_length=1,
            parallel_output=True,
            # Of several stages the last has a copy, whose gradient is summed with the first's by `MegatronParallel`. A shared output layer
            # takes no memory.
            share_embeddings_and_output_weights=(arch.tied or headless) and place.stages == 1,
            position_embedding_type="none",
            pre_process=self.first,
            post_process=self.last,
        )
        if headless and self.last:
            self.module.output_layer = None
        if mixture is not None:
            for layer in self.module.decoder.layers:
                layer.mlp = mixture()
        if self.last:
            _own_norms(self.module.decoder, eps)
        self.module.to(device=device, dtype=dtype)
        self._rows = Rows()
        self.layers: list[Any] = list(self.module.decoder.layers)
        for one in self.module.modules():
            if isinstance(one, CoreAttention):
                one.rows = self._rows

    def states(self, ids_RL: Tensor, angles_LR: Tensor, attend: Attend, given: Tensor | None = None) -> Tensor:
        """[R, L, H] states behind the last norm, of all positions on every tensor rank. Of a stage before the last one what it hands on.

        Args:
            ids_RL: token ids; L is a multiple of the tensor ranks.
            angles_LR: [L, R, 1, D] float32, what rotary embeddings turn each pair by.
            attend: within the rows.
            given: [L / tensor ranks, R, H] that the stage before this one handed on; None: this is the first.
        """
        self._rows.attend = attend
        hidden = self.module.embedding(input_ids=ids_RL, position_ids=None) if given is None else None
        self.module.set_input_tensor(given)
        hidden = self.module.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles_LR)
        if not self.last:
            return hidden
        if self.config.sequence_parallel:
            # The head's backward pass gives every rank the whole gradient: cut it, do not sum it.
            hidden = self._core.gather_sequence(hidden, tensor_parallel_output_grad=False)
        return hidden.transpose(0, 1)

    def run_again(self, layer: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What `layer` makes of its input, once more in the backward pass."""
        attend, module = self._rows.attend, getattr(layer, "__self__", None)

        def run(*given: Any, **named: Any) -> Any:
            self._rows.attend = attend  # of several stages another micro-batch may have been run meanwhile
            try:
                return layer(*given, **named)
            finally:
                # A layer that is run once more ends as soon as all is there that its backward pass needs: before megatron-core 0.19 lets go
                # of this, which holds what its attention has computed.
                if getattr(module, "mlp_norm_manager", None) is not None:
                    setattr(module, "mlp_norm_manager", None)  # noqa: B010

        return checkpoint(run, *given, **CHECKPOINT, **named)

    @property
    def head(self) -> Tensor:
        """[V / tensor ranks, H] rows of the output layer, padding included."""
        tied = self.module.share_embeddings_and_output_weights
        return self.module.embedding.word_embeddings.weight if tied else self.module.output_layer.weight

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor ranks of this one."""
        group: dist.ProcessGroup = self._core.parallel_state.get_tensor_model_parallel_group()
        return group


class _Imported:
    """Names of megatron-core."""

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.core.transformer import torch_norm
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.parallel_state: Any = parallel_state
        self.local_spec: Any = get_gpt_layer_local_spec
        self.GPTModel: Any = GPTModel
        self.gather_sequence: Any = gather_from_sequence_parallel_region
        self.initialize_rng_tracker: Any = initialize_rng_tracker
        self.torch_norm: Any = torch_norm
        self.TransformerConfig: Any = TransformerConfig


def imported() -> _Imported:
    """megatron-core, which must not import wandb where that is installed: it is slow to come, and leaves files behind."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
    try:
        with warnings.catch_warnings():  # of what is faster with Transformer Engine and Apex
            warnings.simplefilter("ignore")
            return _Imported()
    except ImportError as error:
        raise ConfigError(
            f"megatron-core cannot be imported: {error}",
            hint="pip install 'streamrl[megatron]' has what it needs and does not name",
            key="trainer.backend",
        ) from error
    finally:
        if hidden:
            del sys.modules["wandb"]


def _begin(core: _Imported, place: Place, device: torch.device, timeout_s: float) -> None:
    """Megatron's groups, over the default group; of one process that has none, over one of its own."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # sequence parallelism asks for it, on GPUs before Blackwell
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of what is faster otherwise, and of its own old names
    for said in ("`torch.distributed", ".*tp_group"):
        warnings.filterwarnings("ignore", message=said)
    global _alone
    if not dist.is_initialized():
        _alone = True
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    core.parallel_state.destroy_model_parallel()
    core.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=place.tensors,
        pipeline_model_parallel_size=place.stages,
        order="tp-cp-ep-pp-dp",  # stages of a replica are neighbours, so that they are of one host
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )
    # There is no dropout: a tracker that keeps no state of CUDA's generator.
    core.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def end() -> None:
    """Forget Megatron's groups, and the default group where it was made here: another trainer of this process may have more ranks."""
    global _alone
    imported().parallel_state.destroy_model_parallel()
    if _alone and dist.is_initialized():
        dist.destroy_process_group()
    _alone = False


def _spec(core: _Imported, arch: Architecture) -> Any:
    """A layer of megatron-core's own modules, but for norms and attention."""
    spec = core.local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if arch.experts:
        layer.mlp = Absent
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The block makes its last norm by this class, whatever the layers have, and the class refuses sequence parallelism.
    core.torch_norm.WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps=1e-6, *__, **___: RMSNorm(config, hidden_size, eps)
    return spec


def _own_norms(decoder: Any, eps: float) -> None:
    if not isinstance(decoder.final_layernorm, RMSNorm) or decoder.final_layernorm.eps != eps:
        raise ConfigError(
            "megatron-core made its last norm otherwise than this trainer knows", hint="use another version of it", key="trainer.backend"
        )


def stand_in() -> None:
    """Patch this process, once, unless it has CUDA.

    - `torch.cuda.current_device`: gathered sequences and gradients are allocated on it, forward and backward.
    - `torch.cuda.synchronize`: process groups are made behind one.
    """
    if torch.cuda.is_available():
        return
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda device=None: None
