"""Other people's training scripts, with the two lines of README changed, beside their own selves: see README.md."""
