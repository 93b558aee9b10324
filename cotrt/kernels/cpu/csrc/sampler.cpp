#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace cotrt {
namespace {

constexpr double kMaxGumbel = 16.6356;
constexpr double kMinTemperature = 1e-6;
constexpr double kSlack = 1.001;  // for the float32 arithmetic of a race

double temperature_of(const Draw& d) { return std::max(double(d.temperature), kMinTemperature); }

double score(const Draw& d, float logit, float top, int32_t id) {
  const double u = (double(noise_bits(d.key, uint32_t(id)) >> 9) + 0.5) * 0x1p-23;
  return (double(logit) - double(top)) / temperature_of(d) - std::log(-std::log(u));
}

// The largest score wins, ties go to the lowest id.
struct Winner {
  double score = -std::numeric_limits<double>::infinity();
  int32_t id = std::numeric_limits<int32_t>::max();
  bool offer(double s, int32_t i) {
    if (s < score || (s == score && i >= id)) return false;
    score = s;
    id = i;
    return true;
  }
};

}  // namespace

Drawn Sampler::draw(const Draw& d, int vocab) {
  const KernelTable& k = kernels();
  const Drawn bad{-1, std::numeric_limits<float>::quiet_NaN(), true};
  const int blocks = ceil_div(vocab, kSampleBlock);
  maxima_.reserve(size_t(blocks) * 4);
  weights_.reserve(size_t(blocks) * kSampleBlock * 4);
  const float top = k.block_maxima(d.logits, vocab, maxima_.as<float>());
  if (!std::isfinite(top)) return bad;
  const bool greedy = d.temperature == 0.f;
  const bool by_k = d.top_k > 0 && d.top_k < vocab;
  const bool all = !greedy && !by_k;
  const bool own = d.raw == d.logits;
  // Weights at the draw's temperature, which at 1 are the raw distribution's too.
  double mass = 0;
  if (all) {
    const float inverse = float(1.0 / temperature_of(d));
    mass = k.exp_sum(d.logits, vocab, top, inverse, weights_.as<float>());
    if (std::isnan(mass)) return bad;
  }
  const bool unit = all && own && d.temperature == 1.f;
  float raw_top = top;
  if (!own) {
    raw_top = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < vocab; ++i) raw_top = d.raw[i] > raw_top ? d.raw[i] : raw_top;
  }
  const double raw_mass = unit ? mass : k.exp_sum(d.raw, vocab, raw_top, 1.f, nullptr);
  if (std::isnan(raw_mass)) return bad;

  int32_t token = 0;
  if (greedy) {
    int b = 0;
    while (maxima_.as<float>()[b] != top) ++b;
    token = b * kSampleBlock;
    while (d.logits[token] != top) ++token;
  } else {
    token = by_k ? draw_from_top_k(d, vocab, top) : draw_from_all(d, vocab, top, mass);
  }
  return {token, float(double(d.raw[token]) - double(raw_top) - std::log(raw_mass)), false};
}

int32_t Sampler::draw_from_top_k(const Draw& d, int vocab, float top) {
  const float* maxima = maxima_.as<float>();
  const int blocks = ceil_div(vocab, kSampleBlock), k = d.top_k;
  // The k-th largest block has k tokens at least as large, so none of the k largest is below it.
  float bound = -std::numeric_limits<float>::infinity();
  if (k <= blocks) {
    order_.assign(maxima, maxima + blocks);
    std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<float>());
    bound = order_[size_t(k) - 1];
  }
  candidates_.clear();
  for (int b = 0; b < blocks; ++b) {
    if (!(maxima[b] >= bound)) continue;
    const int end = min_int(vocab, (b + 1) * kSampleBlock);
    for (int i = b * kSampleBlock; i < end; ++i)
      if (d.logits[i] >= bound && d.logits[i] > -std::numeric_limits<float>::infinity())
        candidates_.push_back({d.logits[i], i});
  }
  const size_t n = std::min(size_t(k), candidates_.size());
  std::partial_sort(candidates_.begin(), candidates_.begin() + std::ptrdiff_t(n), candidates_.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
                    });
  const double t = temperature_of(d);
  const auto weight = [&](size_t i) {
    return std::exp((double(candidates_[i].logit) - double(top)) / t);
  };
  double total = 0;
  if (d.top_p < 1.f)
    for (size_t i = 0; i < n; ++i) total += weight(i);
  Winner best;
  double before = 0;
  for (size_t i = 0; i < n; ++i) {
    if (d.top_p < 1.f || d.min_p > 0.f) {
      const double w = weight(i);
      const bool kept = (d.top_p >= 1.f || before < double(d.top_p) * total) && w >= double(d.min_p);
      if (i > 0 && !kept) break;  // weights fall: what follows is cut too
      before += w;
    }
    best.offer(score(d, candidates_[i].logit, top, candidates_[i].id), candidates_[i].id);
  }
  return best.id;
}

int32_t Sampler::draw_from_all(const Draw& d, int vocab, float top, double mass) {
  const KernelTable& k = kernels();
  const float* weights = weights_.as<float>();
  const float* maxima = maxima_.as<float>();
  const int blocks = ceil_div(vocab, kSampleBlock), padded = blocks * kSampleBlock;
  const double t = temperature_of(d);

  // Top-p: the largest weight from which upwards there is enough mass, by halving the range of its
  // bit patterns, which are in the order of the weights.
  float least = std::numeric_limits<float>::min();
  std::vector<Candidate>& ties = candidates_;
  ties.clear();
  if (d.top_p < 1.f) {
    const double wanted = double(d.top_p) * mass;
    const auto as_float = [](uint32_t u) {
      float f;
      std::memcpy(&f, &u, 4);
      return f;
    };
    uint32_t low = 0x00800000u, high = 0x3f800001u;  // enough at low (or nowhere), not at high
    if (k.sum_at_least(weights, padded, as_float(low)) >= wanted) {
      // All tokens lighter than (1 - p) / V together do not make 1 - p.
      const float floor = float(mass * (1.0 - double(d.top_p)) / double(vocab) * 0.99);
      uint32_t u;
      std::memcpy(&u, &floor, 4);
      if (u > low && u < high && k.sum_at_least(weights, padded, floor) >= wanted) low = u;
      while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        (k.sum_at_least(weights, padded, as_float(middle)) >= wanted ? low : high) = middle;
      }
    }
    least = as_float(low);
    double before = k.sum_at_least(weights, padded, as_float(low + 1));
    // Of tokens of exactly this weight the likeliest, then the lowest, as far as mass is wanted.
    const float reach = top + float(std::log(double(least)) * t);
    const float bound = reach - std::fabs(reach) * 1e-5f - std::fabs(top) * 1e-5f - float(t) * 1e-4f;
    for (int b = 0; b < blocks; ++b) {
      if (maxima[b] < bound) continue;
      for (int i = b * kSampleBlock; i < min_int(vocab, (b + 1) * kSampleBlock); ++i)
        if (weights[i] == least) ties.push_back({d.logits[i], i});
    }
    std::sort(ties.begin(), ties.end(), [](const Candidate& a, const Candidate& b) {
      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    });
    size_t kept = 0;
    while (kept < ties.size() && before < wanted) {
      before += double(least);
      ++kept;
    }
    ties.resize(kept);
    least = as_float(low + 1);  // the race takes what is above; ties are offered one by one
  }
  if (d.min_p > least) least = d.min_p;

  Winner best;
  for (const Candidate& c : ties)
    if (std::exp((double(c.logit) - double(top)) / t) >= double(d.min_p))
      best.offer(score(d, c.logit, top, c.id), c.id);
  // Begin with the likeliest token's block: the better the score to beat, the fewer may win.
  int first = 0;
  while (maxima[first] != top) ++first;
  for (int step = 0; step <= blocks; ++step) {
    const int b = step == 0 ? first : step - 1;
    if (step && b == first) continue;
    // Nothing this far below the best logit can win, however lucky.
    if ((double(maxima[b]) - double(top)) / t + kMaxGumbel + 1e-3 < best.score) continue;
    const float factor =
        best.score > -1e300 ? float(std::exp(-best.score) * 0x1p23 * kSlack) : 1e30f;
    uint64_t may = k.race(weights + b * kSampleBlock, uint32_t(b) * kSampleBlock, d.key, least, factor);
    for (; may; may &= may - 1) {
      const int i = b * kSampleBlock + __builtin_ctzll(may);
      if (i < vocab) best.offer(score(d, d.logits[i], top, i), i);
    }
  }
  return best.id;
}

}  // namespace cotrt
