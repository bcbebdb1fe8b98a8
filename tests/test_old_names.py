"""Names of version 0.2 that have other names now occur in no document, example, message or report."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD = (
    r"\bStep\([^()\n]*\b(strategy|audit)=",
    r"\bsw\.(fsdp|join_process_group|sharded|samples|signal_to_noise|check_transform)\b",
    r"\bsw\.(select|margin|hessian|ProjectedStore)\b",
    r"\bsamplewise\.(distributed|integrations\.loggers|testing\.zoo)\b",
    r"\b(ledger|Ledger\([^()]*\))\.samples\(",
    r"\bLedger\([^()\n]*\b(directory|every)=",
    r"\.second_moment\(",
    r"\brenormalis",
    r"\b(drop|align|suspects|weight)\([^()\n]*\bby=",
    r"\bclip\([^()\n]*\bper=",
    r"\b(sum|mean)\([^()\n]*\breduce=True",
    r"\bPrivacy\([^()\n]*\b(unit|group|mode|samples)=",
    r"\b(scan|fisher)\([^()\n]*\bmemory=",
    r"\bfit\([^()\n]*\boverfit=",
    r"\b(trak|ProjectedStore)\([^()\n]*\bpath=",
    r"\bfolder=",
    r"\bdefault_damping\b",
    r"\bstep\.(attach_process_group|consumed|has_deferred_samples|started_updates|slow_compile_notice|window_state)\b",
    r"\bdata sets?\b",
    r"\b(colour|behaviour|neighbour|normalis(e|ed|es|ing)|recognis(e|ed|es|ing)|optimis(e|ed|es|ing))",
)
# The changelog has the old names, the public names of others and this file as well.
FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docs/**/*.py", "examples/*.py", "benchmarks/*.py", "src/**/*.*")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".js", ".css", ".html") and path.name != "CHANGELOG.md"
)


@pytest.fixture(scope="module")
def texts():
    return {path: path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("pattern", OLD)
def test_no_file_contains_an_old_name(pattern, texts):
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        if re.search(pattern, text)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert lines == [], "CHANGELOG.md has the names of 0.3"
