# Everything lives in .venv; no target repeats what is up to date. Pass flags on with ARGS='…'.
