"""As of the other example of Accelerate's."""

from __future__ import annotations

import clients.accelerate_nlp.stand_ins  # noqa: F401
