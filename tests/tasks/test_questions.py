"""Questions from every source in one form, what is refused, and scores by the official rules."""

import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_hub import Hub
from lineartime.base.errors import DataError
from lineartime.tasks.qa import questions
from lineartime.tasks.qa.questions import Document, Question, read_questions
from text_files import make

CASES = json.loads((Path(__file__).parent / "qa_cases.json").read_text(encoding="utf-8"))
TEXT = "Ada Lovelace wrote the first program in 1843. It was for the Analytical Engine."


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_cases_worked_out_by_hand(case):
    found = [score(case["prediction"], case["accepted"]) for score in (questions.exact_match, questions.f1)]
    assert found == pytest.approx([float(Fraction(case["em"])), float(Fraction(case["f1"]))])


LETTERS = st.sampled_from("aAnThe hE.,-_'\u2019`\u00b4\n\t2İΣß中é")
TEXTS = st.text(alphabet=st.one_of(LETTERS, st.characters(codec="utf-8")), max_size=30)


@settings(max_examples=100)
@given(TEXTS)
def test_words_are_the_normalised_text_with_their_places(text):
    words = questions.words_of(text)
    assert [word.text for word in words] == questions.normalize(text).split()
    for word in words:
        assert word.text in text[word.start : word.stop].lower() and not text[word.start].isspace()
    assert all(a.stop <= b.start for a, b in itertools.pairwise(words)) or "İ" in text


def test_an_answer_is_found_after_normalisation():
    text = "The U.S.! (u s) but the us and U.S.S.R."
    found = [text[start:stop] for start, stop in questions.occurrences(questions.words_of(text), ["U.S."])]
    assert found == ["U.S", "u s", "U.S"]
    assert questions.occurrences(questions.words_of("well known"), ["Well-Known", "the", ""]) == [(0, 10)]
    assert questions.occurrences(questions.words_of("a b a b a"), ["b b"]) == [(2, 7)]


def test_a_question_without_prediction_counts_as_zero_and_one_without_answer_does_not_count():
    answers = {"1": ("x",), "2": ("y",), "3": (), "4": ("z",)}
    asked = [Question(id, "Who?", (), accepted, accepted) for id, accepted in answers.items()]
    scores = questions.score_answers(asked, {"1": "the X", "3": "z", "4": "w", "other": "?"})
    assert scores == pytest.approx({"n_questions": 3, "n_missing": 1, "exact_match": 100 / 3, "f1": 100 / 3})
    with pytest.raises(DataError, match="labelled"):
        questions.score_answers(asked[2:3], {"3": "z"})


def triviaqa(folder, **changes):
    """A TriviaQA file and its evidence."""
    record = {"QuestionId": "q1", "Question": "Who wrote the first program?",
              "EntityPages": [{"Filename": "Ada.txt"}], "SearchResults": [{"Filename": "0/0_1.txt"}],
              "Answer": {"Value": "Ada Lovelace", "Aliases": ["Ada Lovelace", "Countess of Lovelace"],
                         "NormalizedAliases": ["ada lovelace", "countess of lovelace"]}, **changes}
    record = {name: value for name, value in record.items() if value is not None}
    make(folder, {"evidence/wikipedia/Ada.txt": TEXT, "evidence/web/0/0_1.txt": "Byron's daughter, Ada.",
                  "qa/dev.json": json.dumps({"Domain": "Wikipedia", "VerifiedEval": False, "Data": [record]})})
    return folder / "qa/dev.json"


def parquet(folder, **changes):
    record = {"question": "Who wrote the first program?", "question_id": "q1",
              "entity_pages": {"title": ["Ada"], "filename": ["Ada.txt"], "wiki_context": [TEXT]},
              "search_results": {"title": ["x"], "url": ["http://x"], "search_context": [""]},
              "answer": {"value": "Ada Lovelace", "aliases": ["Ada Lovelace"], "normalized_aliases": ["ada lovelace"]},
              **changes}
    path = folder / "train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist([record]), path)
    return path


def test_triviaqa_json(tmp_path):
    triviaqa(tmp_path, Answer={"Value": "Ada", "Aliases": ["Ada", "Ada L."], "NormalizedAliases": ["ada"],
                               "HumanAnswers": ["The Countess"]})
    (found,) = read_questions([tmp_path / "qa" / "*.json"])
    assert (found.id, found.text) == ("q1", "Who wrote the first program?")
    assert [(document.name, document.text()) for document in found.documents] == [
        ("Ada.txt", TEXT), ("0/0_1.txt", "Byron's daughter, Ada.")]
    assert found.answers == ("Ada", "Ada L.") and found.accepted == ("ada", "The Countess")
    triviaqa(tmp_path, Answer={"Value": "", "Aliases": [], "NormalizedAliases": []})
    assert next(read_questions([tmp_path / "qa" / "*.json"])).answers == ()


def test_evidence_may_lie_elsewhere(tmp_path):
    path = triviaqa(tmp_path)
    (tmp_path / "evidence").rename(tmp_path / "proof")
    with pytest.raises(DataError, match=r"no such file of evidence: .*Ada\.txt.*Data\[0\].*--evidence"):
        list(read_questions([path]))
    (found,) = read_questions(path, tmp_path / "proof")
    assert found.documents[0].text() == TEXT


def test_the_verified_part(tmp_path):
    path = triviaqa(tmp_path)
    content = json.loads(path.read_text())
    content["VerifiedEval"] = True
    content["Data"] = [{**content["Data"][0], "QuestionId": id, "QuestionPartOfVerifiedEval": id == "v"} for id in "uv"]
    for record in content["Data"]:
        record["EntityPages"][0]["DocPartOfVerifiedEval"] = True
        record["SearchResults"][0]["DocPartOfVerifiedEval"] = False
    path.write_text(json.dumps(content))
    (found,) = read_questions([path])
    assert found.id == "v" and [document.name for document in found.documents] == ["Ada.txt"]


def test_unlabelled_questions(tmp_path):
    nothing = {"value": "<unk>", "aliases": [], "normalized_aliases": []}
    for path in (triviaqa(tmp_path, Answer=None), parquet(tmp_path, answer=nothing)):
        (found,) = read_questions([path])
        assert found.answers == found.accepted == ()


def test_parquet(tmp_path):
    (found,) = read_questions([parquet(tmp_path)])
    assert found == Question("q1", "Who wrote the first program?", (Document("Ada.txt", TEXT),), ("Ada Lovelace",),
                             ("ada lovelace",))
    (found,) = read_questions([parquet(tmp_path, entity_pages={
        "title": ["x"], "filename": ["Ada.txt"], "wiki_context": [""]})])
    assert found.documents == ()


def test_the_hub_gives_the_same_question(tmp_path, monkeypatch):
    (expected,) = read_questions([parquet(tmp_path)])
    (record,) = pq.read_table(parquet(tmp_path)).to_pylist()
    hub = Hub({"mandarjoshi/trivia_qa": {"train": [record], "validation": [{**record, "answer": None}]}})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    name = "hub:mandarjoshi/trivia_qa:rc.wikipedia/"
    assert list(read_questions([f"{name}train"])) == list(read_questions([f"{name}train[:1]"])) == [expected]
    assert hub.asked == [("mandarjoshi/trivia_qa", "rc.wikipedia")] * 2 and hub.bars
    with pytest.raises(DataError, match=r"not a row of .*: hub:.*validation, row 1"):
        list(read_questions([f"{name}validation"]))


@pytest.mark.parametrize(("made", "changes", "words"), [
    (triviaqa, {"QuestionId": None}, r"not TriviaQA's JSON: .*Data\[0\]; 'QuestionId' is missing"),
    (triviaqa, {"Question": 3}, "a text is not a string"), (triviaqa, {"Question": "\ud800"}, "a lone surrogate"),
    (triviaqa, {"EntityPages": [{"Filename": "../secret.txt"}]}, "not the name of a file of evidence"),
    (triviaqa, {"Answer": {"Value": "x", "Aliases": "abc", "NormalizedAliases": []}}, "not TriviaQA's JSON"),
    (parquet, {"answer": {"value": "x", "aliases": ["x"]}}, "row 1; 'normalized_aliases' is missing"),
    (parquet, {"entity_pages": {"filename": ["a", "b"], "wiki_context": ["x"]}}, "columns of different lengths")])
def test_a_record_with_a_fault(tmp_path, made, changes, words):
    with pytest.raises(DataError, match=words) as refused:
        list(read_questions([made(tmp_path, **changes)]))
    assert refused.value.exit_code == 3 and "\n" not in str(refused.value)


def test_a_file_that_is_none(tmp_path):
    for content, words in (("{", "not valid JSON: .*x.json, column 2"), ('{"Data": []}', "no questions"),
                           ('{"data": []}', "not TriviaQA's JSON: .*'Data' is missing")):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(DataError, match=words):
            list(read_questions([tmp_path / "x.json"]))
