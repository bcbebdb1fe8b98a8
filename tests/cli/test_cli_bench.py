"""samplewise bench."""

import getpass
import json
import math
import platform
from pathlib import Path

import pytest
import torch
from recipes import command, one_line
from torch import nn

import samplewise
from samplewise.bench import bench, measure
from samplewise.bench.networks import NETWORKS, Work, classification, resnet18_model, small_vit
from samplewise.bench.report import read_report
from samplewise.core import memory
from samplewise.core import text as progress
from samplewise.diagnostics import profile
from samplewise.engine.rules import RULES, Rule, broadcast
from samplewise.testing.case import Case, noise, squared_loss


def tiny(scale):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Work(model, (torch.randn(4, 6), torch.arange(4) % 3), classification)


@pytest.fixture
def small(monkeypatch):
    """One case of the zoo and one tiny network."""
    monkeypatch.setattr(profile, "MIN_ROUNDS", 1)
    monkeypatch.setattr(bench, "QUICK_CASES", 1)
    monkeypatch.setattr(bench, "NETWORKS", {"tiny": tiny})
    monkeypatch.setattr(bench, "small_vit", tiny)
    monkeypatch.setattr(bench, "vit_s", tiny)


@pytest.fixture
def measured(small, tmp_path):
    """Function that runs the command and returns its result and the report."""

    def run(exit_code=0):
        result = command("bench", "--device", "cpu", "--quick", "--json", "out.json")
        assert result.exit_code == exit_code, result.output
        return result, json.loads(Path("out.json").read_text())

    return run


def test_the_report_of_the_cpu(measured):
    result, report = measured()
    assert read_report(Path("out.json")) == report
    assert [zoo["precision"] for zoo in report["zoo"]] == ["float64", "float32", "bfloat16, autocast"]
    assert all(zoo["right"] == 1 and not zoo["exceptions"] for zoo in report["zoo"])
    assert [exact["right"] for exact in report["transforms"]["exact"]] == [True] * len(bench.TRANSFORMS)
    (network,) = report["networks"]
    assert (network["parameters"], network["samples"], network["precision"]) == (83, 4, "float32")
    assert network["norm_error"] < 1e-5
    plain, *others = network["updates"]
    assert plain["ratio"] == 1 and all(update["ratio"] > 0 and update["ms"] > 0 for update in others)
    assert [update["waits"] for update in network["updates"]] == [None] * 4
    lines = result.stdout.splitlines()
    assert lines[-1] == "No problems found." and "Report: out.json" in lines
    assert sum("not applicable" in line for line in lines) == 4 + 1 + len(bench.TRANSFORMS)


def test_the_environment_has_no_names_and_no_paths(measured):
    text = json.dumps(measured()[1])
    environment = json.loads(text)["environment"]
    assert environment["samplewise"] == samplewise.__version__ and environment["torch"] == str(torch.__version__)
    assert environment["device"] == "cpu" and environment["driver"] is None
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text


def test_progress_is_shown(measured, monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    lines = measured()[0].stderr.splitlines()
    total = 3 + len(bench.TRANSFORMS) + 1 + len(bench.TRANSFORMS) + 4
    assert lines[-1] == f"measurements: {total} of {total}" and len(lines) == total


def test_wrong_gradients_end_with_exit_code_1(measured, monkeypatch):
    monkeypatch.setitem(RULES, ("Addmm", 0), Rule(lambda use: broadcast.summed(use, 1.5 * use.gradient)))
    result, report = measured(exit_code=1)
    assert report["zoo"][0]["wrong"] == 1
    assert not any(exact["right"] for exact in report["transforms"]["exact"] if "clip" in exact["update"])
    assert "zoo, float64: linear_on_vectors is wrong: norms: off by " in result.stdout
    assert "tiny, float32: SamplesInteractError: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Problems found: ")


def test_a_measurement_that_fails_leaves_the_others(measured, monkeypatch):
    """An error of a path of this machine is not passed on."""

    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no kernel in /home/somebody/torch/lib.so for this device\nand more")

    def broken(scale):
        return Work(Broken(6, 3), tiny(scale).batch, classification)

    monkeypatch.setattr(bench, "NETWORKS", {"broken": broken, "tiny": tiny})
    result, report = measured(exit_code=1)
    assert report["networks"][0]["error"] == "RuntimeError: no kernel in … for this device"
    assert report["networks"][0]["updates"] == [] and len(report["networks"][1]["updates"]) == 4
    assert "broken, float32: RuntimeError: no kernel in … for this device" in result.stdout


def test_cases_that_pytorch_cannot_run_are_not_wrong(measured, monkeypatch):
    unfit = Case("unfit", lambda B: (nn.Linear(6, 3), noise(B, 5)), squared_loss)
    monkeypatch.setattr(bench, "CASES", {"unfit": unfit})
    result, report = measured(exit_code=1)
    assert report["zoo"][0]["not_run"] == 1 and report["zoo"][0]["exceptions"][0]["outcome"] == "not run"
    assert "zoo: nothing was compared\nProblems found: 1." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "Invalid value for --device: must be a device that torch can use; found 'abacus': "),
        (["--device", "meta"], "Invalid value for --device: must be a device that computes; found meta."),
        (["--json", "nowhere/out.json"], "--json: must be a file in an existing directory; found nowhere"),
        (["--json", "."], "Invalid value for --json: must be a file in an existing directory; found .."),
        (["--quik"], "No such option: --quik"),
    ],
)
def test_bad_arguments_get_one_line(arguments, message):
    result = command("bench", *arguments)
    assert message in one_line(result)
    assert result.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_cuda_gets_one_line():
    result = command("bench", "--device", "cuda", "--json", "out.json")
    assert one_line(result).startswith("samplewise: Invalid value for --device: must be a device that torch can use; ")
    assert result.exit_code == 2 and not Path("out.json").exists()


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_quick_networks_have_norms_of_single_samples(name):
    work = bench.seeded_work(NETWORKS[name], "quick")
    assert measure.error_of_norms(work, torch.device("cpu"), measure.FLOAT32)[0] < 1e-4


def test_sizes_of_the_real_networks():
    with torch.device("meta"):
        assert (
            sum(p.numel() for p in resnet18_model().parameters()) == 11_681_832
        )  # that of torchvision, with a stem of 3 × 3
        work = small_vit("accelerator")
    assert work.batch[0].shape == (128, 3, 64, 64)


def test_an_error_of_one_update_leaves_the_others():
    def broken():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    device = torch.device("cpu")
    results = measure.measure_updates({"plain": lambda: None, "broken": broken}, device, 0.0, lambda parts: None)
    assert results[0]["error"] is None and results[0]["ratio"] == 1
    assert results[1]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert results[1]["ms"] is results[1]["ratio"] is None


def test_norms_of_nan_are_a_problem(measured, monkeypatch):
    monkeypatch.setattr(bench, "fit_to_memory", lambda work, *_: (work, math.inf, 1.0))
    result, report = measured(exit_code=1)
    assert report["networks"][0]["norm_error"] is None
    assert "tiny, float32: norms must be right up to 1e-03; found an error of NaN" in result.stdout


def test_paths_are_left_out():
    text = measure.without_paths("cannot open /home/me/x.so, C:\\Users\\me\\y.dll or ~me but a/b is 5 ms/update")
    assert text == "cannot open … … or … but a/b is 5 ms/update"


@pytest.mark.parametrize(("threads", "clock"), [(1, "process_time"), (2, "perf_counter")])
def test_the_clock(monkeypatch, threads, clock):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert measure.clock_of(torch.device("cpu")).__name__ == clock
    assert measure.clock_of(torch.device("cuda")).__name__ == "perf_counter"


# --- peak memory and TF32 (core.memory) -------------------------------------------------------------------------------


@pytest.mark.skipif(platform.system() != "Linux", reason="resident memory is read from /proc")
def test_peak_memory_of_a_call_on_the_cpu():
    megabytes = memory.peak_bytes(lambda: torch.ones(2**24), torch.device("cpu")) / 2**20  # 64 MiB
    assert 56 < megabytes < 96


def test_a_system_without_resident_memory_has_no_peak(monkeypatch):
    monkeypatch.setattr(memory, "Path", lambda path: Path("missing") / path.strip("/"))
    assert memory.peak_bytes(lambda: None, torch.device("cpu")) is None


def test_tf32_settings_are_restored():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    for allowed in (True, False):
        with memory.allow_tf32(allowed):
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has other settings")
def test_newer_tf32_settings_are_restored():
    """PyTorch refuses to read the older settings then."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [place.fp32_precision for place in places]
    try:
        for place, precision in zip(places, ("tf32", "tf32", "ieee"), strict=True):
            place.fp32_precision = precision
        with pytest.raises(RuntimeError):
            _ = torch.backends.cudnn.allow_tf32
        with memory.allow_tf32(False):
            assert [place.fp32_precision for place in places] == ["ieee"] * 3
        assert [place.fp32_precision for place in places] == ["tf32", "tf32", "ieee"]
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
