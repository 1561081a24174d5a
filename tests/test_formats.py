"""Each format's configuration says the same model as the canonical one, and nothing is filled in."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import FalconMambaConfig

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.files import write_json
from mamba_cli.formats import FORMATS, detect, get_format
from mamba_cli.schema import tensor_shapes
from mamba_cli.shapes import PUBLISHED, published_config
from model_testing import BASE, VARIANTS, hybrid, variant

MAMBA1 = replace(
    BASE,
    layer="Mamba1",
    d_ssm=64,
    headdim=1,
    chunk_size=256,
    rmsnorm=False,
    dt_rank=2,
)
FALCON = replace(MAMBA1, bcdt_norm_eps=1e-6)
CONFIGS = VARIANTS | {"mamba1": MAMBA1, "mamba1_with_bias": replace(MAMBA1, bias=True, dt_rank=5)}
INFINITY = (0.0, math.inf)

# What only mamba_ssm's own format holds.
STATE_SPACES_ONLY = set(
    "part_of_the_width_is_ssm layer_norm mlp everything hybrid hybrid_without_conv hybrid_interleaved_rotary "
    "hybrid_with_mlp_and_biases odd_heads".split()
)
HELD = {
    "state-spaces": CONFIGS.keys() - {"odd_heads"},
    "hf": CONFIGS.keys() - STATE_SPACES_ONLY - {"D_per_channel", "no_gated_norm", "norm_before_gate"},
    "fla": (CONFIGS.keys() - STATE_SPACES_ONLY | {"odd_heads"}) - {"mamba1", "mamba1_with_bias"},
}


def write(name: str, config: ModelConfig) -> dict:
    """Return the config.json that format `name` writes, after a parser that knows no Infinity."""
    return json.loads(json.dumps(get_format(name).write_config(config, torch.bfloat16), allow_nan=False))


def read(name: str, raw: dict, shapes=None) -> ModelConfig:
    return get_format(name).read_config(raw, shapes or {})


def message(function, *arguments) -> str:
    with pytest.raises(Mamba2Error) as caught:
        function(*arguments)
    return caught.value.message


def hf(**changes) -> dict:
    return write("hf", BASE) | changes


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("format", HELD)
@pytest.mark.parametrize("name", CONFIGS)
def test_format_holds_a_model_or_says_why_not(format, name):
    config = replace(CONFIGS[name], bos_token_id=1, eos_token_id=2)
    reasons = get_format(format).cannot_hold(config)
    assert bool(reasons) == (name not in HELD[format]), reasons
    if not reasons:
        if format == "state-spaces":  # its configuration has no token ids
            config = replace(config, bos_token_id=None, eos_token_id=None)
        assert read(format, write(format, config)) == config


@pytest.mark.parametrize(
    ("format", "config", "reason"),
    [
        ("hf", hybrid(), "attention layers 1"),
        ("hf", variant(mlp_dim=128), "d_intermediate 128"),
        ("hf", variant(rms_norm=False), "LayerNorm"),
        ("hf", variant(d_ssm=32), "d_ssm 32 below d_inner 64"),
        ("hf", variant(D_has_hdim=True), "D_has_hdim"),
        ("hf", variant(rmsnorm=False), "rmsnorm false"),
        ("hf", variant(norm_before_gate=True), "norm_before_gate"),
        ("hf", variant(gated_norm_eps=1e-6), "epsilon 1e-05 and 1e-06"),
        ("hf", VARIANTS["odd_heads"], "d_inner 72"),
        ("fla", MAMBA1, "Mamba-1"),
        ("fla", variant(d_ssm=32), "d_ssm 32"),
        ("state-spaces", variant(norm_eps=1e-6, gated_norm_eps=1e-6), "1e-06"),
        ("state-spaces", FALCON, "FalconMamba"),
        ("state-spaces", VARIANTS["odd_heads"], "d_inner 72"),
        ("state-spaces", variant(mlp_dim=100), "width 100"),
    ],
)
def test_reason_names_what_has_no_place(format, config, reason):
    assert reason in ", ".join(get_format(format).cannot_hold(config))


@pytest.mark.parametrize("config", [MAMBA1, FALCON, replace(FALCON, norm_eps=1e-6)])
def test_hugging_face_keeps_mamba1_and_falcon_mamba_apart(config):
    raw = write("hf", config)
    assert raw["model_type"] == ("mamba" if config.bcdt_norm_eps is None else "falcon_mamba")
    assert read("hf", raw) == config


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("name", ["plain", "untied", "hybrid"])
def test_tensor_names_map_both_ways(format, name):
    names = list(tensor_shapes(CONFIGS[name]))
    stored = [format.stored_name(name) for name in names]
    assert len(set(stored)) == len(names)
    assert [format.canonical_name(name) for name in stored] == names
    assert all(format.canonical_name(name) == name for name in names)  # `embedding.` is accepted, too


@pytest.mark.parametrize(
    ("raw", "format"),
    [
        (write("hf", BASE), "hf"),
        (write("hf", FALCON), "hf"),
        (write("fla", BASE), "fla"),
        (hf(fuse_norm=True), "fla"),
        (write("state-spaces", BASE), "state-spaces"),
        ({"d_model": 8, "n_layer": 1}, "state-spaces"),
        (hf(d_model=32, n_layer=2, ssm_cfg={}), "hf"),
    ],
)
def test_format_is_recognised_by_its_configuration(tmp_path, raw, format):
    write_json(tmp_path / "config.json", raw)
    found, reason = detect(tmp_path)
    assert found.name == format
    assert reason.startswith("config.json has ")


@pytest.mark.parametrize(("raw", "named"), [({"model_type": "llama"}, "llama"), ({}, "neither")])
def test_unknown_model_is_refused_by_name(tmp_path, raw, named):
    write_json(tmp_path / "config.json", raw)
    assert named in message(detect, tmp_path)


def test_folder_without_a_configuration_names_the_missing_file(tmp_path):
    assert "config.json" in message(detect, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "expected JSON" in message(detect, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "expected a JSON object" in message(detect, tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    expected = published_config(name)
    raw = {
        "d_model": expected.d_model,
        "d_intermediate": 0,
        "n_layer": expected.n_layer,
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    if expected.layer == "Mamba1":  # published before there was another
        raw |= {"ssm_cfg": {}, "pad_vocab_size_multiple": 8}
    assert read("state-spaces", raw) == expected


def test_published_hybrid_is_read():
    raw = {
        "d_model": 2560,
        "n_layer": 64,
        "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [9, 18, 27, 36, 45, 56],
        "attn_cfg": {
            "causal": True,
            "d_conv": 4,
            "head_dim": 128,
            "num_heads": 30,
            "out_proj_bias": False,
            "qkv_proj_bias": False,
            "rotary_emb_dim": 64,
        },
        "pad_vocab_size_multiple": 16,
    }
    config = read("state-spaces", raw)
    assert config.attn_layer_idx == (9, 18, 27, 36, 45, 56)
    assert (config.attention.num_heads_kv, config.attention.softmax_scale) == (30, 128**-0.5)
    shapes = tensor_shapes(config)
    assert shapes["backbone.layers.9.mixer.in_proj.weight"] == (3 * 30 * 128, 2560)


def test_state_spaces_without_a_layer_is_mamba1_by_the_defaults_of_mamba_ssm():
    config = read("state-spaces", {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}})
    assert (config.layer, config.d_state, config.dt_rank, config.d_inner) == ("Mamba1", 16, 48, 1536)
    assert config.vocab_rows == 50280
    assert config.tie_embeddings


def test_mlp_widths_are_rounded_as_mamba_ssm_stores_them():
    config = read("state-spaces", write("state-spaces", BASE) | {"d_intermediate": 129})
    assert config.mlp_dim == 256
    raw = write("state-spaces", hybrid())
    raw["attn_cfg"]["mlp_dim"] = 257
    assert read("state-spaces", raw).attention.mlp_dim == 512


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("ssm_cfg", "layer", "Mamba3", "Mamba3"),
        ("ssm_cfg", "use_bcdt_rms", True, "use_bcdt_rms"),
        ("ssm_cfg", "d_state", "16", "'16'"),
        ("ssm_cfg", "d_state", True, "True"),
        ("ssm_cfg", "dt_limit", [0.1], "dt_limit"),
        ("ssm_cfg", "expand", 1.51, "expand"),
        ("attn_cfg", "causal", False, "causal"),
        ("attn_cfg", "window", 128, "window"),
        ("attn_cfg", "softmax_scale", -1, "softmax_scale"),
        ("attn_cfg", "rotary_emb_base", 0, "rotary_emb_base"),
        (None, "moe_cfg", {}, "moe_cfg"),
        (None, "attn_layer_idx", [3], "attn_layer_idx"),
        (None, "attn_layer_idx", 1, "attn_layer_idx"),
        (None, "pad_vocab_size_multiple", 0, "0"),
        (None, "n_layer", 2.0, "n_layer"),
    ],
)
def test_state_spaces_value_that_mamba_ssm_has_no_meaning_for_is_named(section, key, value, named):
    raw = write("state-spaces", hybrid())
    (raw[section] if section else raw)[key] = value
    assert named in message(read, "state-spaces", raw)


@pytest.mark.parametrize(
    "spelling",
    ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', "null", "[0.0, null]", "[0, 3.5e38]", None],
)
def test_every_spelling_of_no_upper_limit_is_read(tmp_path, spelling):
    """Among them what transformers writes now and what it wrote before, which is no JSON."""
    names = {"hf": "time_step_limit", "fla": "dt_limit", "state-spaces": "dt_limit"}
    for format, key in names.items():
        raw = write(format, BASE)
        if spelling is not None:
            (raw["ssm_cfg"] if format == "state-spaces" else raw)[key] = json.loads(spelling)
        assert read(format, raw).dt_limit == INFINITY


@pytest.mark.parametrize("limit", [INFINITY, (0.01, math.inf), (0.01, 0.05), (0.0, 0.1)])
@pytest.mark.parametrize("format", HELD)
def test_limits_of_dt_survive_strict_json(format, limit):
    config = variant(dt_limit=limit)
    assert read(format, write(format, config)).dt_limit == limit


def test_sizes_that_a_hugging_face_configuration_lacks_are_those_of_the_tensors():
    config = variant(ngroups=2, bias=True, conv_bias=False, vocab_size=64, tie_embeddings=False)
    shapes = tensor_shapes(config)
    raw = write("hf", config)
    derivable = (
        "hidden_size num_hidden_layers vocab_size conv_kernel use_bias use_conv_bias num_heads head_dim "
        "expand tie_word_embeddings"
    ).split()
    assert read("hf", without(raw, *derivable), shapes) == config
    assert read("hf", without(raw, "state_size"), shapes) == config
    assert read("hf", without(raw, "n_groups"), shapes) == config
    assert "state_size" in message(read, "hf", without(raw, "n_groups", "state_size"), shapes)


@pytest.mark.parametrize("key", ["layer_norm_epsilon", "residual_in_fp32", "hidden_act"])
def test_what_tensors_cannot_say_is_asked_for_and_not_made_up(key):
    assert f"config.json {key}" in message(read, "hf", without(hf(), key), tensor_shapes(BASE))


def test_absent_sizes_of_mamba1_are_those_of_the_tensors():
    raw = without(write("hf", FALCON), "state_size", "time_step_rank", "expand", "intermediate_size")
    assert read("hf", raw, tensor_shapes(FALCON)) == FALCON
    assert read("hf", write("hf", MAMBA1) | {"time_step_rank": "auto"}).dt_rank == 2
    assert "mixer_rms_eps" in message(read, "hf", without(raw, "mixer_rms_eps"), tensor_shapes(FALCON))


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (hf(expand=3), ("96", "64")),
        (hf(num_heads=5), ("64", "80")),
        (hf(n_groups=3), ("3", "4")),
        (hf(hidden_act="gelu"), ("gelu",)),
        (hf(conv_kernel=5), ("5",)),
        (hf(layer_norm_epsilon=float("nan")), ("nan",)),
        (hf(layer_norm_epsilon=-1), ("norm_eps", "-1")),
        (hf(layer_norm_epsilon=1e300), ("norm_eps", "1e+300")),
        (hf(chunk_size=0), ("chunk_size", "0")),
        (hf(unpadded_vocab_size=65), ("65", "64")),
        (hf(eos_token_id="</s>"), ("</s>",)),
        (write("hf", MAMBA1) | {"use_bcdt_rms": True}, ("use_bcdt_rms",)),
    ],
)
def test_contradiction_is_named_with_both_values(raw, named):
    said = message(read, "hf", raw)
    assert all(word in said for word in named), said


def test_width_of_mamba1_is_the_one_that_transformers_takes():
    raw = write("hf", FALCON) | {"expand": 16}
    assert read("hf", raw).d_inner == FalconMambaConfig(**raw).intermediate_size == 64
    raw = without(raw, "intermediate_size")
    assert read("hf", raw).d_inner == FalconMambaConfig(**raw).intermediate_size == 512


def test_fractional_expand_is_read():
    assert read("hf", hf(expand=1.5, num_heads=3)).d_inner == 48


def test_norm_before_gate_in_a_hugging_face_configuration_means_nothing():
    assert not read("hf", hf(norm_before_gate=True)).norm_before_gate


def test_first_of_several_end_tokens_is_the_end_token():
    assert read("hf", hf(eos_token_id=[7, 8])).eos_token_id == 7


def test_older_fla_configuration_is_read():
    new = write("fla", variant(dt_limit=(0.01, 0.05)))
    old = without(new, "dt_limit", "rmsnorm", "D_has_hdim", "norm_before_gate") | {
        "time_step_limit": [0.01, 0.05],
        "rms_norm": True,
        "fuse_norm": True,
    }
    config = variant(dt_limit=(0.01, 0.05))
    assert read("fla", old, tensor_shapes(config)) == config


def test_padded_vocabulary_is_kept_beside_the_row_count():
    raw = write("hf", BASE)
    assert (raw["vocab_size"], raw["unpadded_vocab_size"]) == (64, 61)
    assert read("hf", without(raw, "unpadded_vocab_size")).vocab_size == 64
    assert "unpadded_vocab_size" not in write("hf", variant(vocab_size=64))


@pytest.mark.parametrize(
    ("real", "rows"), [(50277, 50288), (50277, 50280), (61, 64), (64, 64), (61, 61), (5, 97)]
)
def test_state_spaces_padding_gives_the_rows_there_are(real, rows):
    config = variant(vocab_size=real, vocab_rows=rows)
    assert read("state-spaces", write("state-spaces", config)) == config
