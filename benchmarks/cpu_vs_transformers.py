"""Prefill and decode of a published shape on this CPU: ours beside transformers', in one run.

    python benchmarks/cpu_vs_transformers.py --shape 130m --dtype bfloat16
    python benchmarks/cpu_vs_transformers.py --shape mamba1-130m --dtype bfloat16

Random weights, batch 1. Both run the same weights; their logits are compared before anything is timed.
The two sides take turns, and the best of the rounds counts, so that other load hits both alike.
"""

import argparse
import json
import platform
import time

import torch
import transformers

from mamba_cli.config import ModelConfig
from mamba_cli.language_model import LanguageModel
from mamba_cli.load import DTYPES
from mamba_cli.shapes import PUBLISHED, published_config
from mamba_cli.weights import Weights, random_tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="130m", choices=PUBLISHED)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = published_config(options.shape)
    tensors = random_tensors(config)
    dtype = DTYPES[options.dtype]
    ours = LanguageModel(config, Weights(tensors.__getitem__, set(tensors), torch.device("cpu"), dtype))
    theirs = transformers_model(config, tensors, dtype)
    ids = torch.randint(config.vocab_size, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    check_agreement(ours, theirs, ids)

    best = {"ours": [0.0, 0.0], "transformers": [0.0, 0.0]}
    for _ in range(options.rounds):
        for name, run in (("ours", run_ours), ("transformers", run_theirs)):
            figures = run(ours if name == "ours" else theirs, ids, options.tokens)
            best[name] = [max(pair) for pair in zip(best[name], figures, strict=True)]

    print(
        f"{options.shape} {options.dtype}, {options.threads} threads, {platform.processor() or 'cpu'}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for index, work in enumerate((f"prefill of {options.prompt}", "decode")):
        mine, other = best["ours"][index], best["transformers"][index]
        print(
            f"{work:16} ours {mine:8.1f} tok/s   transformers {other:8.1f} tok/s   ratio {mine / other:.2f}"
        )
    print(
        json.dumps({name: dict(zip(("prefill", "decode"), pair, strict=True)) for name, pair in best.items()})
    )


@torch.inference_mode()
def run_ours(lm: LanguageModel, ids: torch.Tensor, tokens: int) -> tuple[float, float]:
    start = time.perf_counter()
    logits, state = lm.prefill(ids)
    middle = time.perf_counter()
    for _ in range(tokens):
        logits = lm.step_(logits.float().argmax(-1), state)
    end = time.perf_counter()
    return ids.shape[1] / (middle - start), tokens / (end - middle)


@torch.inference_mode()
def run_theirs(model, ids: torch.Tensor, tokens: int) -> tuple[float, float]:
    start = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    middle = time.perf_counter()
    for _ in range(tokens):
        token = out.logits[:, -1:].float().argmax(-1)
        out = model(token, cache_params=out.cache_params, use_cache=True)
    end = time.perf_counter()
    return ids.shape[1] / (middle - start), tokens / (end - middle)


@torch.inference_mode()
def check_agreement(ours: LanguageModel, theirs, ids: torch.Tensor) -> None:
    mine, other = ours(ids[:, :64]).float(), theirs(ids[:, :64]).logits.float()
    error = ((mine - other).norm() / other.norm()).item()
    if not error < (1e-4 if ours.dtype == torch.float32 else 5e-2):
        raise SystemExit(f"the two sides disagree: relative error {error:.1e}")


def transformers_model(config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
    common = dict(
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layer,
        vocab_size=config.vocab_rows,
        state_size=config.d_state,
        conv_kernel=config.d_conv,
        expand=config.d_inner // config.d_model,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        if config.layer == "Mamba1":
            hf = transformers.MambaConfig(**common, time_step_rank=config.dt_rank)
            model = transformers.MambaForCausalLM(hf)
        else:
            hf = transformers.Mamba2Config(
                **common,
                head_dim=config.headdim,
                num_heads=config.nheads,
                n_groups=config.ngroups,
                chunk_size=config.chunk_size,
            )
            model = transformers.Mamba2ForCausalLM(hf)
    renamed = {name.replace("embedding.", "embeddings."): tensor for name, tensor in tensors.items()}
    renamed["lm_head.weight"] = renamed["backbone.embeddings.weight"]
    model.load_state_dict(renamed, assign=True, strict=True)
    model.tie_weights()
    return model.to(dtype).eval()


if __name__ == "__main__":
    main()
