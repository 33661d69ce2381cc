"""These tests need packages that `make test` does not install: `make test-frameworks` runs them in an environment of
their own, which scripts/frameworks_env.sh makes.
"""

import os
import sys
from pathlib import Path

from tests.mortal_ranks import preload

wanted = Path(sys.prefix).name == ".venv-frameworks"
collect_ignore_glob = [] if wanted else ["test_*.py"]

if wanted:
    # Nothing is fetched or reported while tests run, and no framework looks for an accelerator.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    # Ranks are forked from a process that has imported them, which takes seconds.
    preload("accelerate", "transformers.trainer", "lightning.pytorch")
