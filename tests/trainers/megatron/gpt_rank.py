"""One rank of a real megatron-core `GPTModel` on a CPU: loads a distributed checkpoint, or saves one; a program of tests.

usage: gpt_rank.py load|save RANK TENSORS STAGES STORE MODEL CHECKPOINT OUT

`load`: the checkpoint into a model, then its parameters and logits into OUT/<rank>.pt. `save`: the Hugging Face MODEL's values into a
model by `streamrl.models.megatron.names`, then a checkpoint of it.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["WANDB_MODE"] = "disabled"

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from streamrl.models.megatron.names import Place, architecture, parameters
from tests.trainers.megatron.gpt_tokens import PADDED_TO, TOKENS


class OnCpu(TorchFunctionMode):
    """megatron-core allocates on CUDA by name: here it gets memory of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


FUSIONS = ("bias_activation", "bias_dropout", "masked_softmax", "apply_rope", "gradient_accumulation")
OFF = ("add_bias_linear", *(f"{what}_fusion" for what in FUSIONS))


def build(config: dict[str, Any], tensors: int, stages: int) -> GPTModel:
    """The model of a Hugging Face configuration, in float32, on this rank."""
    arch = architecture(config, "config.json")
    options: dict[str, Any] = dict.fromkeys(OFF, False) | dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)
    if arch.experts:
        options |= {"num_moe_experts": arch.experts, "moe_ffn_hidden_size": arch.intermediate}
        options |= {"moe_router_topk": config["num_experts_per_tok"], "moe_router_load_balancing_type": "none"}
        options |= {"moe_router_pre_softmax": False, "moe_token_dispatcher_type": "allgather"}
    made = TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        tensor_model_parallel_size=tensors,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        **options,
    )
    spec = get_gpt_layer_local_spec(arch.experts or None, False, arch.qk_norm, normalization="RMSNorm")
    rope = config.get("rope_parameters", {}).get("rope_theta") or config["rope_theta"]
    return GPTModel(
        made,
        spec,
        PADDED_TO,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=rope,
    )


def fill(model: GPTModel, config: dict[str, Any], whole: dict[str, torch.Tensor], place: Place) -> None:
    """Put a checkpoint's values where the table of names says they are; padding is 7."""
    held = dict(model.named_parameters())
    arch = architecture(config, "config.json")
    for one in parameters(arch, place, PADDED_TO):
        value = torch.full(one.shape, 7.0)
        for part in one.parts:
            view = value.unflatten(0, (-1, part.period))[:, part.first : part.first + part.run]
            box = whole[part.name][tuple(slice(first, first + size) for first, size in zip(part.offset, part.held, strict=True))]
            view.copy_(box.reshape(view.shape))
        assert held[one.name].shape == value.shape, one.name
        held.pop(one.name).data.copy_(value)
    assert not held, held.keys()


def logits(model: GPTModel) -> torch.Tensor | None:
    """Of TOKENS, on the last stage."""
    tokens = torch.tensor(TOKENS)
    count, length = tokens.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not first:
        came = torch.empty(length, count, model.config.hidden_size)
        dist.recv(came, dist.get_rank() - parallel_state.get_tensor_model_parallel_world_size())
        model.set_input_tensor(came)
    with torch.no_grad():
        out = model(tokens, positions, mask)
    if last:
        return out
    dist.send(out.contiguous(), dist.get_rank() + parallel_state.get_tensor_model_parallel_world_size())
    return None


def main() -> None:
    """See the module."""
    what, rank, tensors, stages, store, directory, checkpoint, out = sys.argv[1:]
    world = int(tensors) * int(stages)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=world)
    parallel_state.initialize_model_parallel(int(tensors), int(stages))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
    moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined without Transformer Engine
    parallel_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with OnCpu(), contextlib.redirect_stdout(sys.stderr):
        config = json.loads((Path(directory) / "config.json").read_text())
        model = build(config, int(tensors), int(stages))
        place = Place(tensor=int(rank) % int(tensors), tensors=int(tensors), stage=int(rank) // int(tensors), stages=int(stages))
        state, whole = {"model": model.sharded_state_dict()}, load_file(Path(directory) / "model.safetensors")
        if what == "save":
            fill(model, config, whole, place)
            dist_checkpointing.save(state, checkpoint)
        else:
            fill(model, config, {name: torch.full_like(value, 7.0) for name, value in whole.items()}, place)
            common = dist_checkpointing.load_common_state_dict(checkpoint)
            assert common["args"].tensor_model_parallel_size == 1
            loaded: Any = dist_checkpointing.load(state, checkpoint)
            model.load_state_dict(loaded["model"])
            torch.save(
                {"place": (place.tensor, place.stage), "parameters": dict(model.named_parameters()), "logits": logits(model)},
                Path(out) / f"{rank}.pt",
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
