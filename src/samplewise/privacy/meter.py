"""`step.privacy`: what a private step has spent, and its record on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from samplewise.errors import PrivacyError
from samplewise.parallel.group import current_group, on_every_rank
from samplewise.privacy.privacy import Privacy
from samplewise.privacy.release_log import load_secret, remove_secret, save_secret
from samplewise.privacy.rng import Secret


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far: (epsilon, delta) after `updates` releases; `left`: updates that are still paid for."""

    epsilon: float
    delta: float
    updates: int
    left: int

    def __repr__(self) -> str:
        return f"({self.epsilon:.4g}, {self.delta:g})-DP after {self.updates} updates; {self.left} left"


class PrivacyMeter:
    """Privacy of one step: `step.privacy`. `plan`: its sw.Privacy. `zeroed`: number of samples so far whose loss or
    gradient was not finite, and which contributed nothing; the guarantee does not cover this number.
    """

    def __init__(self, plan: Privacy):
        self.plan = plan
        self.zeroed = 0
        self._state = plan._state  # state and spending are shared by all steps of the plan
        self._release_log = plan._release_log
        self._directory: Path | None = None

    def __repr__(self) -> str:
        return f"{self.plan!r};\nspent {self.spent()!r}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PrivacyError(
            "a private step must not be copied, because the copy would use the same noise, and neither would count the "
            "updates of the other; found that it is being copied. Copy its model, and create a new step with a new "
            "sw.Privacy."
        )

    def spent(self) -> Spent:
        """Epsilon and delta of the updates so far, and how many are left."""
        made = self._release_log.count
        return Spent(self.plan.epsilon_after(made), self.plan.delta, made, self.left)

    @property
    def left(self) -> int:
        """Number of updates that are still paid for."""
        return max(0, self.plan.updates - self._release_log.count)

    @property
    def is_spent(self) -> bool:
        """True if no further update is paid for, not even as the repetition of an earlier one."""
        return self._state.update >= self.plan.updates or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """True if repeated updates have used up what is paid for before the last planned update is made."""
        state = self._state
        is_replay = (state.secret.public_id, state.branch, state.update) in self._release_log.releases
        return state.update < self.plan.updates and not (self.left or is_replay)

    # --- files -------------------------------------------------------------------------------------------------------

    def open(self, directory: str | Path) -> None:
        """Record spending in a directory, and continue what is recorded there. Call it before the first update.

        It holds `privacy.jsonl`, and `privacy.key` until `close(done=True)`. A trainer calls it with its run directory.
        """
        directory = Path(directory).resolve()
        state = self._state
        state.check_process()
        if self._directory == directory:
            return
        spending = self._release_log
        on_every_rank((lambda: self._open_files(directory)) if current_group().rank == 0 else lambda: None)
        self._directory = state.directory = directory
        known = current_group().broadcast_object((spending.releases, spending.diverged))
        spending.releases, spending.diverged = known
        state.share_secret()
        state.choose_branch(spending.diverged)

    def _open_files(self, directory: Path) -> None:
        state = self._state
        spending = self._release_log
        moved = state.directory not in (None, directory)
        if moved and (spending.is_open or spending.count):
            raise PrivacyError(
                "the updates of one sw.Privacy must be recorded in one directory, because each record counts its own "
                f"updates only; found {directory} after {state.directory}. Create a new sw.Privacy for each run."
            )
        spending.open(directory, self.plan._settings)
        if self.plan.seed is not None:
            return
        if not spending.inherits:  # a key that is here was copied, or its log is lost: its noise may be used elsewhere
            remove_secret(directory)  # not overwritten: it may be a hard link
        if moved:  # another directory has the key
            state.secret = Secret.new()
        secret = load_secret(directory)
        if secret is None:
            save_secret(directory, state.secret)
        else:
            state.secret = secret

    def close(self, done: bool = False) -> None:
        """Close the log. `done`: the run has ended, so that the key is not needed any more."""
        if self._directory is not None and current_group().rank == 0:
            self._release_log.close()
            if done or self.is_spent:
                remove_secret(self._directory)
        self._directory = None
