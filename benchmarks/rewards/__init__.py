"""`streamrl bench rewards`: how fast graders that block are worked off, and the quickstart's speed while some of them hang."""
