"""`python -m fairseq_ccpr`: the command `fairseq-ccpr`."""

from fairseq_ccpr.cli import main

if __name__ == "__main__":
    main()
