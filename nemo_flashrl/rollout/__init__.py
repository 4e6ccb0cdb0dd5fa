"""Episodes: prompts -> trajectories -> batches. Imports no trainer.

Collector (collector.py) --episode--> run_episode (episode.py) --ids--> an Engine (engines/)
     |  PromptStream (prompts.py)          |--text, by Codec (chat_tokens.py)--> Environment (environments/)
     +--> Batch (records.py)
"""
