"""BibTeX of the papers behind baselines and objectives."""

from __future__ import annotations

_ENTRY = """@article{{{key},
  title   = {{{{{title}}}}},
  author  = {{{authors}}},
{where}}}"""


def _paper(key: str, title: str, authors: str, year: int | None, arxiv: str = "", journal: str = "") -> str:
    known = {"year": year, "journal": journal, "eprint": f"arXiv:{arxiv}" if arxiv else ""}
    where = "".join(f"  {name:7} = {{{value}}},\n" for name, value in known.items() if value)
    return _ENTRY.format(key=key, title=title, authors=authors, where=where)


PAPERS = {
    "basis": _paper(
        "gong2026basis",
        "BASIS: Batchwise Advantage Estimation from Single-Rollout Information Sharing for LLM Reasoning",
        "Gong, Shijin and Xu, Erhan and Ye, Kai and Quinzan, Francesco and Livieri, Giulia and Shi, Chengchun",
        2026,
    ),
    "reinforce_pp": _paper(
        "hu2025reinforcepp",
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
        "Hu, Jian and Liu, Jason Klein and Xu, Haotian and Shen, Wei",
        2025,
        "2501.03262",
    ),
    "otb": _paper(
        "li_optimal_token_baseline",
        "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL",
        "Li, Yingru and Xu, Jiawei and Li, Ziniu and Liu, Jiacai and Liu, Wei and Tong, Yuxuan and Zheng, Longtao and "
        "Xue, Zhenghai and Zhang, Yaxiang and Cai, Tianle and Zhang, Ge and Liu, Qian and Wang, Baoxiang",
        None,
    ),
    "bv_blend": _paper(
        "chang2026bvblend",
        "BV-Blend: Uncertainty-Weighted Historical Baselines for Stable Critic-Free RL with Verifiable Rewards",
        "Chang, Yupeng and Wu, Yuan and Chang, Yi",
        2026,
    ),
    "opo": _paper(
        "hao2025opo",
        "On-Policy RL with Optimal Reward Baseline",
        "Hao, Yaru and Dong, Li and Wu, Xun and Huang, Shaohan and Chi, Zewen and Wei, Furu",
        2025,
        "2505.23585",
    ),
    "remax": _paper(
        "li2023remax",
        "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
        "Li, Ziniu and Xu, Tian and Zhang, Yushun and Lin, Zhihang and Yu, Yang and Sun, Ruoyu and Luo, Zhi-Quan",
        2023,
        "2310.10505",
    ),
    "rloo": _paper(
        "ahmadian2024rloo",
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        "Ahmadian, Arash and Cremer, Chris and Gallé, Matthias and Fadaee, Marzieh and Kreutzer, Julia and "
        "Pietquin, Olivier and Üstün, Ahmet and Hooker, Sara",
        2024,
        "2402.14740",
    ),
    "grpo": _paper(
        "shao2024deepseekmath",
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao and "
        "Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya",
        2024,
        "2402.03300",
    ),
    "dr_grpo": _paper(
        "liu2025drgrpo",
        "Understanding R1-Zero-Like Training: A Critical Perspective",
        "Liu, Zichen and Chen, Changyu and Li, Wenjun and Qi, Penghui and Pang, Tianyu and Du, Chao and "
        "Lee, Wee Sun and Lin, Min",
        2025,
        "2503.20783",
    ),
    "gpg": _paper(
        "chu2025gpg",
        "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
        "Chu, Xiangxiang and Huang, Hailang and Zhang, Xiao and Wei, Fei and Wang, Yong",
        2025,
        "2504.02546",
    ),
    "gspo": _paper(
        "zheng2025gspo",
        "Group Sequence Policy Optimization",
        "Zheng, Chujie and Liu, Shixuan and Li, Mingze and others",
        2025,
        "2507.18071",
    ),
    "dapo": _paper(
        "yu2025dapo",
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        "Yu, Qiying and Zhang, Zheng and Zhu, Ruofei and others",
        2025,
        "2503.14476",
    ),
    "ppo": _paper(
        "schulman2017ppo",
        "Proximal Policy Optimization Algorithms",
        "Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg",
        2017,
        "1707.06347",
    ),
    "reinforce": _paper(
        "williams1992reinforce",
        "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        "Williams, Ronald J.",
        1992,
        journal="Machine Learning",
    ),
    "trl": """@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and \
Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}""",
}

_OF_BASELINE = {
    "none": "reinforce",
    "batch_mean": "reinforce",
    "basis_history": "basis",
    "reinforce_pp_baseline": "reinforce_pp",
    "ogb": "otb",
    "isolated_energy": "otb",
}


def citations(baseline: str, objective: str | None = None) -> list[str]:
    """BibTeX entries: the baseline's paper (none for somebody's own class), the objective's, TRL's; each once."""
    keys = [_OF_BASELINE.get(baseline, baseline), objective, "trl"]
    return [PAPERS[key] for key in dict.fromkeys(keys) if key in PAPERS]
