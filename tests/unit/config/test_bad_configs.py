"""Bad configurations: each refused with its place, key, value, rule and what was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from disagmoe.check import make_plan
from disagmoe.config.checks import find_launch_problems
from disagmoe.config.errors import ConfigError
from disagmoe.config.launch import Launch, read_launch
from disagmoe.config.load import load_config


class Bad(NamedTuple):
    """`FILE` stands for the TOML file's path. Only `toml` is appended to a valid file, unless it starts with `!`."""

    name: str
    toml: str
    options: list[str]
    said: list[str]


EP = '[parallelism]\nmode = "ep"\n[expert_parallel]\n'
BAD = [
    Bad(
        "resume from what",
        '[checkpoint]\nenable = true\nresume = "atuo"',
        [],
        ["FILE", 'checkpoint.resume = "atuo"', 'must be "auto", "none" or a step', 'did you mean "auto"?'],
    ),
    Bad(
        "resume with checkpoints off",
        "[checkpoint]\nresume = 40",
        [],
        ["FILE", "checkpoint.resume = 40", "needs checkpoint.enable = true"],
    ),
    Bad(
        "stop after the end",
        "",
        ["--training.steps=5", "--training.stop_after=6"],
        ["command line", "training.stop_after = 6", "must be at most training.steps = 5"],
    ),
    Bad(
        "profile of the unsplit model",
        '[metrics]\nprofile_costs = "costs.json"',
        ["--parallelism.mode=none"],
        ["FILE", 'metrics.profile_costs = "costs.json"', "measures the stages", "leave it out"],
    ),
    Bad("syntax", "!a = [1,\nb = 2\n", [], ["FILE, line 2", "not valid TOML", "`b = 2`"]),
    Bad("repeated key", "[training]\nsteps = 1\nsteps = 2", [], ["FILE, line ", "not valid TOML", "`steps = 2`"]),
    Bad("no recipe", "!", [], ["FILE", "recipe.name", "is missing", "must be a string", "qwen3"]),
    Bad("unknown section", "[trainin]\n", [], ["FILE", "[trainin]", "unknown section", "did you mean [training]?"]),
    Bad("unknown key", "[training]\nstep = 3", [], ["FILE", "training.step = 3", "did you mean training.steps?"]),
    Bad("key elsewhere", "[training]\nlr = 3", [], ["FILE", "training.lr = 3", "did you mean optimizer.lr?"]),
    Bad("no section", "!steps = 3", [], ["FILE", "steps = 3", "unknown key", "did you mean training.steps?"]),
    Bad("value for section", "!training = 3", [], ["FILE", "training = 3", "must be a section", "[training]"]),
    Bad("boolean for integer", "[training]\nsteps = true", [], ["FILE", "training.steps = true", "an integer"]),
    Bad("text for integer", '[training]\nsteps = "9"', [], ["FILE", 'training.steps = "9"', "an integer, at least 1"]),
    Bad("fraction", "[training]\nsteps = 1.5", [], ["FILE", "training.steps = 1.5", "an integer, at least 1"]),
    Bad("date", "[data]\nsource = 2020-01-01", [], ["FILE", "data.source = 2020-01-01", "must be a string"]),
    Bad("zero", "[training]\nsteps = 0", [], ["FILE", "training.steps = 0", "at least 1"]),
    Bad("not a number", "[optimizer]\nlr = nan", [], ["FILE", "optimizer.lr = nan", "must be a finite number"]),
    Bad("share", "[lr_scheduler]\ndecay_ratio = 1.5", [], ["FILE", "decay_ratio = 1.5", "at least 0, at most 1"]),
    Bad("choice", '[training]\ndtype = "float23"', [], ['= "float23"', '"float32" or', 'did you mean "float32"?']),
    Bad("list", "[disagmoe]\nrank_order = [1]", [], ["FILE", "disagmoe.rank_order = [1]", "a list of strings"]),
    Bad("recipe", '!recipe = {name = "qwen33"}', [], ['recipe.name = "qwen33"', "recipes/", "did you mean qwen3?"]),
    Bad("flavor", "", ["--recipe.flavor=debg"], ['recipe.flavor = "debg"', "no such flavor", "did you mean debug?"]),
    Bad("option", "", ["--training.stepz=3"], ["command line", "--training.stepz = ", "mean --training.steps?"]),
    Bad("bare option", "", ["--steps", "3"], ["command line: --steps", "did you mean --training.steps?"]),
    Bad("option's section", "", ["--optimiser.lr=3"], ["command line", "did you mean --optimizer.lr?"]),
    Bad("no value", "", ["--training.steps", "--debug.seed=1"], ["--training.steps", "needs a value"]),
    Bad("no option", "", ["training.steps=3"], ["command line: training.steps=3", "--section.key=value"]),
    Bad("option's type", "", ["--debug.deterministic=yes"], ['debug.deterministic = "yes"', "true or false"]),
    Bad(
        "experts", "[disagmoe]\nffn_workers = 99", [], ["FILE", "ffn_workers = 99", "at most 8, the number of experts"]
    ),
    Bad("F depth", "[disagmoe]\nffn_depth = 7", [], ["FILE", "ffn_depth = 7", "at most 6"]),
    Bad("A depth", "[disagmoe]\nattn_depth = 8", [], ["FILE", "attn_depth = 8", "at most 7"]),
    Bad("micro-batches", "[disagmoe]\nmicrobatches = 17", [], ["microbatches = 17", "must be at most 16", "set "]),
    Bad("share of a replica", "[disagmoe]\nreplicas = 3", [], ["default: disagmoe.microbatches = 8", "at most 5"]),
    Bad("replicas", "[disagmoe]\nreplicas = 17", [], ["disagmoe.replicas = 17", "at most training.global_batch_size"]),
    Bad("colocate", "[disagmoe]\ncolocate = true", [], ["disagmoe.attn_workers = 2", "must be 1", "colocate = false"]),
    Bad("order", '[disagmoe]\nrank_order = "paird"', [], ['= "paird"', '"paired", "mixed",', "did you mean"]),
    Bad("order of workers", '[disagmoe]\nrank_order = ["r0.A0.0", "r0.A0.9"]', [], ["unknown ['r0.A0.9']", "r0.F0.1"]),
    Bad(
        "placement of no such group",
        "[disagmoe]\nattn_depth = 2\nattn_placement = [0, 1, 2]",
        [],
        ["attn_placement = [0, 1, 2]", "each A-group from 0 to 1", "set attn_depth = 3"],
    ),
    Bad(
        "short placement",
        "[disagmoe]\nattn_depth = 2\nattn_placement = [0, 1]",
        [],
        ["FILE", "has 2 entries and must have 7", "one for the head"],
    ),
    Bad(
        "colocated placement",
        "[disagmoe]\ncolocate = true\nattn_workers = 1\nffn_workers = 1\nattn_placement = [0, 1]",
        [],
        ["attn_placement = [0, 1]", "each A-group from 0 to 0"],
    ),
    Bad("placement's type", '[disagmoe]\nattn_placement = "even"', [], ['attn_placement = "even"', "list of integers"]),
    Bad("experts, EP", EP + "expert_workers = 9", [], ["expert_workers = 9", "at most 8, the number of experts"]),
    Bad("ranks, EP", EP + "pipeline_depth = 7", [], ["FILE", "pipeline_depth = 7", "at most 6, the number of layers"]),
    Bad("chunks, EP", EP + "pipeline_depth = 2\nchunks_per_rank = 4", [], ["makes 8 chunks", "chunks_per_rank = 3"]),
    Bad(
        "interleaved micro-batches, EP",
        EP + "pipeline_depth = 3\nchunks_per_rank = 2\nmicrobatches = 7",
        [],
        ["microbatches = 7", "multiple of expert_parallel.pipeline_depth = 3", "set microbatches = 9"],
    ),
    Bad("V, EP", EP + 'overlap = "dual_pipe_v"', [], ["chunks_per_rank = 1", "must be 2", "set chunks_per_rank = 2"]),
    Bad(
        "short V, EP",
        EP + 'overlap = "dual_pipe_v"\nchunks_per_rank = 2\npipeline_depth = 3\nmicrobatches = 5',
        [],
        ["microbatches = 5", "must be at least 6", "set microbatches = 6"],
    ),
    Bad("one part, EP", EP + 'overlap = "chunked"\nnum_chunks = 1', [], ["num_chunks = 1", "at least 2"]),
    Bad("micro-batches, EP", EP + "microbatches = 17", [], ["expert_parallel.microbatches = 17", "at most 16"]),
    Bad("replicas, EP", EP + "replicas = 17", [], ["expert_parallel.replicas = 17", "at most training.global_batch"]),
    Bad("overlap, EP", EP + 'overlap = "chunk"', [], ['expert_parallel.overlap = "chunk"', 'did you mean "chunked"?']),
    Bad("sequence", "[training]\nseq_len = 1000000", [], ["FILE", "training.seq_len = 1000000", "at most 4096"]),
    Bad("strict NCCL", '[comm]\nbackend = "nccl"\nstrict_order = true', [], ["strict_order = true", "gloo"]),
    Bad("missing file", '[data]\nsource = "./no.jsonl"', [], ["FILE", '= "./no.jsonl"', "no such file"]),
    Bad("source", "", ["--data.source=python-stdlb"], ['"python-stdlb"', 'did you mean "python-stdlib"?']),
    Bad("dataset name", "", ["--data.source=what is this"], ['"what is this"', "owner/name"]),
    Bad("suffix", "", ["--data.source=FILE"], ["data.source", "ends in .txt or .jsonl or .parquet"]),
    Bad("tokenizer", "", ["--data.tokenizer=byte"], ['data.tokenizer = "byte"', 'did you mean "bytes"?']),
    Bad("tokenizer folder", "", ["--data.tokenizer=FOLDER"], ["data.tokenizer", "with a tokenizer.json"]),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def write(path: Path, toml: str) -> None:
    path.write_text(toml[1:] if toml.startswith("!") else f'[recipe]\nname = "qwen3"\n{toml}\n')


@pytest.mark.timeout(10)
@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_refused_with_place_key_value_rule_and_advice(bad: Bad, path: Path) -> None:
    write(path, bad.toml)
    places = {"FILE": str(path), "FOLDER": str(path.parent)}
    with pytest.raises(ConfigError) as error:
        make_plan(load_config(path, [_fill(option, places) for option in bad.options]))
    for part in bad.said:
        assert _fill(part, places) in str(error.value)


def _fill(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def test_missing_file_names_the_nearest(path: Path) -> None:
    write(path, "")
    with pytest.raises(ConfigError, match=r"mine2.toml: there is no such file; did you mean .*/mine.toml\?"):
        load_config(path.with_name("mine2.toml"))


def test_tokenizer_must_fit_the_vocabulary(path: Path, tmp_path: Path) -> None:
    write(path, "")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    file = folder / "tokenizer.json"
    file.write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 99999}]}')
    with pytest.raises(ConfigError, match=r"has 100000 token ids, but qwen3-debug has room for"):
        make_plan(load_config(path, [f"--data.tokenizer={folder}"]))
    file.write_text('{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}')
    make_plan(load_config(path, [f"--data.tokenizer={folder}"]))
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json can't be read"):
        make_plan(load_config(path, [f"--data.tokenizer={folder}"]))


LAUNCHES = [
    ([], Launch(ngpu=4), None),
    ([], Launch(nnodes=2), None),
    ([], Launch(ngpu=2, nnodes=2), None),
    ([], Launch(num_gpus=4), None),
    ([], Launch(ngpu=3), r"NGPU = 3: processes make 3, but the layout needs 4 processes .*; set NGPU=4, or change"),
    ([], Launch(ngpu=4, nnodes=2), r"NGPU = 4: processes on each of NNODES = 2 nodes make 8.*; set NGPU=2"),
    ([], Launch(nnodes=3), r"NNODES = 3: must divide the number of processes: the layout needs 4"),
    (["--parallelism.mode=none"], Launch(ngpu=4), r'parallelism.mode = "none" trains in 1 process; set NGPU=1'),
    (["--parallelism.mode=none", "--disagmoe.ffn_workers=99"], Launch(ngpu=1), None),
    (["--comm.backend=nccl"], Launch(), r"comm.backend = \"nccl\": needs CUDA devices"),
    ([], Launch(num_gpus=1), r"comm.backend = \"auto\": uses one GPU a process: 4 are started.*which has 1; "),
    (["--comm.backend=gloo"], Launch(num_gpus=1), None),
]


@pytest.mark.parametrize(("options", "launch", "said"), LAUNCHES)
def test_launch(path: Path, options: list[str], launch: Launch, said: str | None) -> None:
    write(path, "")
    resolved = make_plan(load_config(path, options)).resolved
    problems = list(find_launch_problems(resolved, launch))
    if said is None:
        assert not problems
    else:
        with pytest.raises(ConfigError, match=said):
            raise ConfigError(problems)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NGPU": "four"}, r'environment: NGPU = "four": must be an integer, at least 1'),
        ({"NGPU": "0"}, r'NGPU = "0": must be an integer, at least 1'),
        ({"NNODES": "2", "NODE_RANK": "2"}, r'NODE_RANK = "2": must be below NNODES = 2'),
    ],
)
def test_launch_variables(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_launch(environ)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--disagmoe.attn_workers=3"], "some A-workers idle"),
        (["--disagmoe.in_flight=9"], "nothing for it to limit"),
        (["--disagmoe.ffn_depth=4"], "F-groups hold 2 / 2 / 1 / 1 stages: the largest one sets the pace"),
        (["--recipe.name=deepseek_moe", "--disagmoe.attn_depth=4"], "attn_placement = [0, 1, 2, 3, 1, 2, 3] it would"),
        (["--training.steps=2"], "never reaches optimizer.lr"),
        (["--optimizer.momentum=0.9"], "no effect on AdamW"),
        (["--parallelism.mode=none", "--disagmoe.attn_workers=9"], "disagmoe.attn_workers: no effect"),
    ],
)
def test_warnings(path: Path, options: list[str], said: str) -> None:
    write(path, "")
    (warning,) = make_plan(load_config(path, options)).warnings
    assert said in warning


def test_no_warning_for_the_defaults(path: Path) -> None:
    write(path, "")
    assert make_plan(load_config(path)).warnings == ()
