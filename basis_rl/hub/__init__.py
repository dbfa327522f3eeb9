"""What of a run goes to the Hub: repository and pushes, model card, citations, results; and no secrets."""
