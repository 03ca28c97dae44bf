"""From what a user names to a `LoadedModel` (`loader.load`), or only to its text assets (`text_source.load_text`)."""
