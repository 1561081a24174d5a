"""A state format as JSON: what is written is read back, and nothing else is accepted."""

import json
from dataclasses import replace

import pytest

from mamba_cli.errors import Mamba2Error
from mamba_cli.quantize.saved import read_recipe
from mamba_cli.quantize.section import read_section, write_heads, write_section
from mamba_cli.state_format import LARGEST_WINDOW, parse_state_spec
from model_testing import BASE, hybrid
from quantize_testing import MAMBA1, quantize, save, some_format


@pytest.mark.parametrize("config", [BASE, hybrid(), MAMBA1], ids=["mamba2", "hybrid", "mamba1"])
@pytest.mark.parametrize("outer", [False, True])
def test_a_format_comes_back_from_its_section_as_it_was(config, outer):
    section = json.loads(json.dumps(write_section(some_format(config), outer)))
    assert read_section(section, config, "here") == (some_format(config), outer)


def test_a_layer_is_said_in_one_word_or_with_its_exceptions():
    assert write_heads(("int8",) * 80) == "int8"
    assert write_heads(("int8", "fp16", "int8", "fp32", "int8", "fp16")) == {
        "dtype": "int8",
        "except": {"fp16": [1, 5], "fp32": [3]},
    }


def changed(**changes) -> dict:
    section = write_section(some_format())
    return {key: value for key, value in (section | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([], "here: expected an object, got \\[\\]"),
        (changed(version=2), "expected version 1, got 2"),
        ({"version": 2, "other": "keys"}, "expected version 1, got 2"),
        (changed(version=True), "expected version 1, got True"),
        (changed(version=...), "here version: expected a value, got no such key"),
        (changed(layers=...), "here layers: expected a value, got no such key"),
        (changed(extra=1), "here: expected only the keys .*, got extra"),
        (changed(name=""), "here name: expected a line"),
        (changed(name="a\nb"), "here name: expected a line"),
        (changed(name=7), "here name: expected a line"),
        (changed(name="fp32"), "here name: expected another name than that of the plain state"),
        (changed(rounding="up"), "here rounding: expected one of nearest, stochastic, got up"),
        (changed(rounding=["nearest"]), "here rounding: expected one of"),
        (changed(window=0), "here window: expected an integer from 1 to 64, got 0"),
        (changed(window=10**9), "here window: expected an integer from 1 to 64"),
        (changed(window=4.0), "here window: expected an integer"),
        (changed(window=True), "here window: expected an integer"),
        (changed(seed=-1), "here seed: expected an integer from 0"),
        (changed(conv="int3"), "here conv: expected one of"),
        (changed(outer=1), "here outer: expected true or false, got 1"),
        (changed(scales="../other.safetensors"), "here scales: expected null or state_scales.safetensors"),
        (changed(layers="int8"), "here layers: expected a list of the model's 2 layers, got int8"),
        (changed(layers=["int8"]), "here layers: expected a list of the model's 2 layers, got 1 of them"),
        (changed(layers=["int8", None]), "here layers\\[1\\]: expected an object, got None"),
        (changed(layers=["int8", "int5"]), "here layers\\[1\\]: expected one of .*, got int5"),
        (changed(layers=["int8", {"dtype": "int8"}]), "layers\\[1\\].except: expected a value"),
        (
            changed(layers=["int8", {"dtype": "int8", "except": {"int5": [0]}}]),
            "layers\\[1\\].except: expected only the keys",
        ),
        (
            changed(layers=["int8", {"dtype": "int8", "except": {"fp16": [4]}}]),
            "layers\\[1\\].except.fp16: expected an integer from 0 to 3, got 4",
        ),
        (
            changed(layers=["int8", {"dtype": "int8", "except": {"fp16": [0], "fp32": [0]}}]),
            "layers\\[1\\].except.fp32: expected each head once, got 0",
        ),
        (
            changed(layers=["int8", {"dtype": "int8", "except": {"fp16": [0] * 9}}]),
            "layers\\[1\\].except.fp16: expected a list of at most 4 heads",
        ),
    ],
)
def test_a_section_that_is_not_right_is_refused_naming_the_key(section, message):
    with pytest.raises(Mamba2Error, match=message):
        read_section(section, BASE, "here")


def test_an_attention_layer_has_no_format():
    section = write_section(some_format(hybrid()))
    section["layers"][1] = "int8"
    with pytest.raises(Mamba2Error, match="layers\\[1\\]: expected null for an attention layer, got int8"):
        read_section(section, hybrid(), "here")


def test_a_model_of_attention_alone_has_no_state_to_keep():
    config = replace(hybrid(), attn_layer_idx=(0, 1, 2))
    section = write_section(some_format(hybrid())) | {"layers": [None] * 3}
    with pytest.raises(Mamba2Error, match="layers: expected a model with a layer that has a state"):
        read_section(section, config, "here")


def test_a_recipe_is_a_section_in_a_file_or_a_configuration_that_holds_one(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(write_section(some_format(), outer=True)))
    assert read_recipe(recipe, BASE) == (some_format(), True)
    quantize(save(tmp_path, "hf"), tmp_path / "out")
    assert read_recipe(tmp_path / "out" / "config.json", BASE) == (some_format(), False)


def test_a_configuration_without_a_section_is_no_recipe(tmp_path):
    message = r"config\.json: expected a recipe's layers, or the key state_quantization, got neither"
    with pytest.raises(Mamba2Error, match=message):
        read_recipe(save(tmp_path, "hf") / "config.json", BASE)


def test_a_window_may_be_as_long_as_in_the_words_of_state_dtype():
    format, _ = read_section(changed(window=LARGEST_WINDOW), BASE, "here")
    assert format.layers[0].window == parse_state_spec(f"int8:{LARGEST_WINDOW}").window
    with pytest.raises(Mamba2Error, match=f"window from 1 to {LARGEST_WINDOW}, "):
        parse_state_spec(f"int8:{LARGEST_WINDOW + 1}")
    with pytest.raises(Mamba2Error, match=f"window: expected an integer from 1 to {LARGEST_WINDOW}, got"):
        read_section(changed(window=LARGEST_WINDOW + 1), BASE, "here")


@pytest.mark.parametrize("content", ["", "[1]", "{", "nonsense", "[" * 10000])
def test_a_recipe_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(Mamba2Error, match=r"recipe\.json: expected"):
        read_recipe(tmp_path / "recipe.json", BASE)
