"""BLEU and chrF of systems that decode a test set in turns, with significance."""
