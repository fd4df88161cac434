"""Experiments from one file of settings: stages that resume, their results, their report."""
