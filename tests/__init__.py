"""Tests of fairseq-ccpr, in folders named after the rooms of the package."""
