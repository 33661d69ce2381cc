"""The optimizer's state as torch keeps it: state_dict(), load_state_dict() and full_state_dict()."""

from __future__ import annotations

from typing import Any

import torch

from zerox.bucket import Bucket, Member
from zerox.full_state import full_state
from zerox.ranks import Ranks
from zerox.rules import adam
from zerox.state_dict import check_state, fill_state, groups_with_defaults, share, state_uncast


class OptimizerState(torch.optim.Optimizer):
    """What of an optimizer is about its state. Each rank has that of its own shards, in buckets."""

    _buckets: list[Bucket]
    _frozen: list[Member]
    _ranks: Ranks | None

    def synchronize(self) -> None:
        raise NotImplementedError

    def _share_state(self) -> None:
        """From now on state_dict() tells which part of what this rank has."""
        self.register_state_dict_post_hook(share, prepend=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what this rank's ``state_dict()`` gave, or whole tensors: full_state_dict()'s or torch.optim.AdamW's.

        In place, and not collective; load the model first. As torch: state of a parameter that isn't given starts anew.
        Warns of what this optimizer's ``state_dtype`` and ``master_weights`` hold less of. Raises ValueError, with
        nothing changed, for groups or sizes that don't fit, and for another rank's share.
        """
        with state_uncast(self):
            super().load_state_dict(state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """On rank 0 what ``torch.optim.AdamW.load_state_dict()`` takes, on the CPU; elsewhere ``{}``. Collective.

        Whole tensors in the parameters' shapes, float32 (float64 beside float64 parameters), and in addition "master",
        float32, of parameters that have one. Above this, rank 0 needs memory for one bucket of one of these.
        """
        self.synchronize()
        state = full_state(self._buckets, self._all_ranks)
        return {"state": state, "param_groups": self.state_dict()["param_groups"]} if self._all_ranks.rank == 0 else {}

    def __setstate__(self, loaded: dict[str, Any]) -> None:
        """What torch's load_state_dict() calls between its own checks and the post-hooks."""
        check_state(self._buckets, self._frozen, loaded["state"])
        self.param_groups = groups_with_defaults(loaded["param_groups"], self.defaults)
        self._start_amsgrad()
        fill_state(self._buckets, loaded["state"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "FusedShardedAdam can't be copied or pickled: its state is spread over ranks, and its hooks belong to the "
            "parameters. Use state_dict()"
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _all_ranks(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    def _start_amsgrad(self, capturing: bool = False) -> None:
        """A group's amsgrad may be turned on later: torch makes its state at the next step too."""
        if adam.start_amsgrad(self._buckets, self.param_groups, capturing):
            self._publish_state()

    def _publish_state(self) -> None:
        """Puts views of this rank's state where torch keeps it."""
        self.state.clear()
        for bucket in self._buckets:
            for param, state in bucket.state_of_own():
                self.state[param] = state
        if self._buckets and not self.state:  # DCP's getters would call step(), on this rank alone
            self.state[self._buckets[0].members[0].param] = {}
