"""Update rules: hyper-parameters in, kernel calls out."""
