"""A batch's lengths -> the microbatches of every data-parallel rank; numbers alone, no tensor.

planner.py         what a user sets and gets: BatchingSettings, LengthBatcher.plan -> Plan
arrangement.py     sorted lengths -> bins, for the two layouts
packed.py          the fewest bins, and the proof of how few that is
padded.py          runs of sorted rows with the least padding
balancing.py       what trajectories of one or several segments cost; exchanges that make ranks cost the same
"""
