"""The subcommands of `fairseq-ccpr` for research, as those in `cli`."""
