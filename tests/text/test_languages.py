"""Names of languages, as models, files and clients have them, are compared as languages."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_ccpr.text.languages import NAMES, as_bcp47, language_code, language_name, same_language


@pytest.mark.parametrize(
    "names",
    [
        "de DE de-AT de_DE deu ger deu_Latn deu-latn-DE", "en en_XX eng_Latn en-GB", "pt pt-BR pt_PT por_Latn",
        "zh zh-CN zh_CN zh-Hans zho_Hans cmn_Hans zh-SG chi", "zh-TW zh-Hant zho_Hant zh_HK zt", "sr sr-Cyrl srp_Cyrl sr_RS",
        "sr-Latn srp_Latn sh", "no nb nob_Latn nb-NO", "nn nno_Latn", "he iw heb_Hebr", "id in ind_Latn", "ko kor_Hang ko-KR",
        "ar arb_Arab", "arz_Arab", "fa pes_Arab", "ms zsm_Latn", "lv lvs_Latn", "et est_Latn", "tl fil tgl_Latn", "ro mo",
        "uz uzn_Latn", "uz-Cyrl", "sw swh_Latn", "ne npi_Deva", "yue_Hant yue", "ja jpn_Jpan", "ace_Arab", "ace_Latn", "den",
        "de1", "fr.tok", "source", "xx",
    ],
)  # fmt: skip
def test_names_of_one_language_are_one_and_no_other(names: str, request: pytest.FixtureRequest) -> None:
    one, *others = names.split()
    assert all(same_language(one, other) and same_language(other, one) for other in others)
    (all_names,) = (mark.args[1] for mark in request.node.iter_markers("parametrize"))
    assert not any(
        same_language(one, other) for group in all_names if group != names for other in group.split()
    )


@given(st.text() | st.text("abdeLatnX_-. 1", max_size=12), st.text(max_size=5))
@example("", "und")
@example("en-a", "x-y")
def test_what_is_no_language_is_one_with_itself_alone(one: str, other: str) -> None:
    assert same_language(one, one) and isinstance(as_bcp47(one) + language_name(one), str)
    assert same_language(one, other) == same_language(other, one)


def test_languages_are_shown_by_the_codes_and_names_that_clients_know() -> None:
    assert {code: language_code(code) for code in NAMES} == {code: code for code in NAMES}
    assert [language_code(one) for one in ("deu_Latn", "zho_Hant", "tgl_Latn", "srp_Latn")] == [
        "de",
        "zh-Hant",
        "tl",
        "sr-Latn",
    ]
    assert [language_name(one) for one in ("kor_Hang", "sr-ME", "uz-Cyrl")] == [
        "Korean",
        "Serbian (Latin)",
        "Uzbek",
    ]
