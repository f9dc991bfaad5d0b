"""An answer that follows each instruction of IFBench and IFEval, and one that does not, written by hand from the instruction's words."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any], str, str]
"""Id, arguments, right, wrong."""

FIVE = {f"keyword{number}": word for number, word in enumerate(("kiwi", "fig", "plum", "pear", "lime"), 1)}
BACKWARDS = "ZYXWVUTSRQPONMLKJIHGFEDCBA"
AFRICA = ["Zimbabwe", *(f"{letter}{end}" for letter in BACKWARDS[1:] for end in "cba")]
ALPHABET = " ".join(f"{letter}nd so it went." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam, Warsaw, London, "
    "Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
PALINDROMES = "level radar civic kayak madam refer rotor tenet stats solos"
QUESTIONS = "\n".join(
    f"Question {number}: Who painted this{' well known' * number}?\n" + "\n".join(f"{letter}) Name" for letter in "ABCDE")
    for number in range(1, 5)
)
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{row},Chile,Arica,2020,{row}" for row in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f'{row},"Toys & Fun",B,1,2' for row in range(14))
STUDENTS = "\n".join('"a"\t"b"\t"c"\t"d"\t"e"'.replace("a", str(row)) for row in range(3))
QUOTED = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + STUDENTS

IFBENCH: list[Case] = [
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two", "one two three four"),
    ("count:unique_word_count", {"N": 3}, "a b c a", "a b a b"),
    ("ratio:stop_words", {"percentage": 25}, "the cats chase mice", "the cats and mice"),
    ("ratio:sentence_type", {}, "It rains. I stay. Do you?", "It rains. Do you?"),
    ("ratio:sentence_balance", {}, "It rains. Do you? Go!", "It rains. Do you?"),
    ("count:conjunctions", {"small_n": 2}, "tea and milk, but warm", "tea and milk and sugar"),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Bob."),
    ("ratio:overlap", {"reference_text": "abcd", "percentage": 50}, "abcx", "abcd"),
    ("count:numbers", {"N": 2}, "1,000 of 7", "1 of 7 in 9"),
    ("words:alphabet", {}, "yes zebras are", "yes yes are"),
    ("words:vowel", {}, "a big cat sits on it", "a big cat sees us on it"),
    ("words:consonants", {}, "street lamps", "street lamp a"),
    ("sentence:alliteration_increment", {}, "It goes. Big bad dogs go. Tiny tame tots talk.", "Big bad dogs. It goes."),
    ("words:palindrome", {}, PALINDROMES, "level level radar"),
    ("count:punctuation", {}, "Well: yes, no; so. What?! Go! Who?", "Well, yes."),
    ("format:parentheses", {}, "a ([{([b])}])", "a ([{b}])"),
    ("format:quotes", {}, '"He said \'she said "no"\'"', '"no"'),
    ("words:prime_lengths", {}, "it has seven", "some four"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "perhaps"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("format:emoji", {}, "It rains. \N{GRINNING FACE} We stay \N{GRINNING FACE}.", "It rains."),
    ("ratio:sentence_words", {}, "A cat. B dog. C cow.", "A cat. B dogs. C cow."),
    ("count:words_japanese", {"N": 2}, "hello \u306d\u3053 there \u3044\u306c", "hello cat"),
    ("words:start_verb", {}, "Write it down.", "Dogs bark."),
    ("words:repeats", {"small_n": 2}, "a b a b", "a b a a"),
    ("sentence:keyword", {"word": "rain", "N": 2}, "It is wet. The rain fell.", "The rain fell. It is wet."),
    ("count:pronouns", {"N": 2}, "I like them.", "I like dogs."),
    ("words:odd_even_syllables", {}, "cat happy dog", "cat dog"),
    ("words:last_first", {}, "I see a cat. Cat is here.", "I see a cat. Dog is here."),
    ("words:paragraph_last_first", {}, "Dogs love dogs.\nCats bite cats.", "Dogs love cats."),
    ("sentence:increment", {"small_n": 2}, "One two. One two three four.", "One two. One two three."),
    ("words:no_consecutive", {}, "a big cat", "a big bad cat"),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n c"),
    ("format:quote_unquote", {}, 'He said "no" and left.', 'He said "no"'),
    ("format:list", {"sep": "!?!?"}, "!?!? one\n!?!? two", "- one\n- two"),
    ("format:thesis", {}, "<i>So it is.</i> More.", "So it is. More."),
    ("format:sub-bullets", {}, "* a\n - b", "* a\n* c\n - b"),
    ("format:no_bullets_bullets", {}, "It is. It was.\n* a\n* b", "It is.\n* a\n* b"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21"),
    ("custom:mcq_count_length", {}, QUESTIONS, "Here: " + QUESTIONS),
    ("custom:reverse_newline", {}, "\n".join(AFRICA), "\n".join(reversed(AFRICA))),
    ("custom:word_reverse", {}, "Eagle bald the is it", "It is the bald eagle"),
    ("custom:character_reverse", {}, ".elgae dlab eht", "the bald eagle"),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET.replace("Bnd", "Cnd")),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, ", "")),
    ("custom:csv_city", {}, CITIES, CITIES + "\n8,Chile,Arica,2020,8"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace('"', "").replace("&", "and")),
    ("custom:csv_quotes", {}, QUOTED, QUOTED.replace('"', "")),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "12 April 1796"),
    ("count:keywords_multiple", FIVE, "kiwi" + " fig" * 2 + " plum" * 3 + " pear" * 5 + " lime" * 7, "kiwi fig plum pear lime"),
    ("words:keywords_specific_position", {"keyword": "rain", "n": 2, "m": 2}, "It is. The rain fell.", "It is. Rain fell."),
    ("words:words_position", {"keyword": "rain"}, "The rain is rain.", "The rain fell here."),
    ("repeat:repeat_change", {"prompt_to_repeat": "Name a dog"}, "Give a dog", "Name a dog"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "No."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 0, "n_end": 2}, "A b", "b c"),
    ("format:title_case", {}, "The Big Dog", "The big Dog"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("format:no_whitespace", {}, "yes", "yes no"),
]

GERMAN = "Heute regnet es den ganzen Tag, und wir bleiben deshalb alle zu Hause."
IFEVAL: list[Case] = [
    ("keywords:existence", {"keywords": ["rain", "sun"]}, "Sun and rain", "Sun"),
    ("keywords:frequency", {"keyword": "rain", "frequency": 2, "relation": "at least"}, "rain, rain", "rain"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "It is raining", "The rain"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a cot", "a cat"),
    ("language:response_language", {"language": "de"}, GERMAN, "It rains all day today, and so we all stay at home."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "It is.", "It is. It was. It will."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "a\n\nSo b",
        "So a\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Write", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 a SECTION 2 b", "SECTION 1 a"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
    ("detectable_format:title", {}, "<<rain>> It", "rain"),
    ("combination:two_responses", {}, "a******b", "a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a dog"}, "Name a dog: Rex", "Rex"),
    ("startend:end_checker", {"end_phrase": "That is all."}, "No. That is all.", "That is all. No."),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "GO ON", "GO on"),
    ("change_case:english_capital", {}, "IT RAINS ALL DAY TODAY, AND SO WE ALL STAY AT HOME.", "It rains all day today."),
    ("change_case:english_lowercase", {}, "it rains all day today, and so we all stay at home.", "It rains all day today."),
    ("punctuation:no_comma", {}, "a and b", "a, b"),
    ("startend:quotation", {}, '"a"', "a"),
]
