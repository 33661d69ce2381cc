"""Bytecode is written, also where PYTHONDONTWRITEBYTECODE is set: tests start hundreds of processes, and each would
compile zerox anew."""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
