"""Options that several commands have, each declared once: fields of settings, as `settings.option` makes them."""

from functools import partial

from fairseq_ccpr.settings import option

data_bin_option = partial(
    option, help="folder that fairseq-ccpr prepare or fairseq-preprocess wrote", positional=True, metavar="DATA_BIN"
)
data_option = partial(
    option,
    None,
    "folder with the model's dictionaries (found in the datastore, or next to the model)",
    metavar="DATA_BIN",
)
cpu_option = partial(option, False, "use the CPU even where there is a GPU")
quiet_option = partial(option, False, "no progress bars")
bf16_option = partial(option, False, "run the encoder in bfloat16, faster where the processor has it")
json_option = partial(option, None, "where the figures go as JSON", metavar="FILE")
plot_option = partial(option, None, metavar="FILE")
count_option = partial(option, within="[1, inf)", needs="at least 1", metavar="N")
counts_option = partial(count_option, nargs="+")
source_language_option = partial(option, flags=("-s",), metavar="LANG")
target_language_option = partial(option, flags=("-t",), metavar="LANG")
