// The softmax of one tile of rows over one chunk of keys, going on from the chunks before.

// Scores become weights 2^(score - max), exactly 0 past what a row sees; row_max and row_sum go on;
// w.alpha is what each row's output so far is multiplied by. visible: keys of the group that each
// row sees; c0: the chunk's first key; seen: keys of the chunk that any row sees; weight_groups:
// groups of 16 weights that are read. Returns whether every alpha is 1.
template <class T>
static bool weigh_keys(const AttentionScratch<T>& w, const int* visible, int c0, int seen, int rows,
                       float scale, int weight_groups, float* row_max, float* row_sum) {
  using R = typename T::Row;
  constexpr int stride = AttentionScratch<T>::kScoreStride;
  const auto sees = [&](int m) { return clamp_int(visible[m] - c0, 0, seen); };
  alignas(64) float top[kMostTileRows], base[kMostTileRows], total[kMostTileRows];
  F each[kLanes];  // of 16 rows, so that their lanes are folded together
  for (int m0 = 0; m0 < rows; m0 += kLanes) {
    const int count = min_int(kLanes, rows - m0);
    for (int m = 0; m < count; ++m) {
      float* sc = w.scores + (m0 + m) * stride;
      const int vis = sees(m0 + m), full = vis / kLanes;
      F most = set1(-INFINITY);
      for (int i = 0; i < full; ++i) most = max(most, load(sc + i * kLanes));
      if (vis % kLanes) {
        const F last = first_lanes(load(sc + full * kLanes), vis % kLanes, set1(-INFINITY));
        store(sc + full * kLanes, last);
        most = max(most, last);
      }
      each[m] = most;
    }
    reduce_max_each(each, count, top + m0);
  }
  bool unscaled = true;
  for (int m = 0; m < rows; ++m) {
    const float before = row_max[m], here = top[m] * scale, now = here > before ? here : before;
    row_max[m] = now;
    base[m] = now == -INFINITY ? 0.f : now;
    top[m] = before - base[m];
    unscaled = unscaled && top[m] == 0.f;
  }
  for (int m = rows; m < kMostTileRows; ++m) top[m] = 0.f;
  for (int m = 0; m < rows; m += kLanes) store(w.alpha + m, exp2(load(top + m)));
  const F vs = set1(scale);
  for (int m0 = 0; m0 < rows; m0 += kLanes) {
    const int count = min_int(kLanes, rows - m0);
    for (int m = 0; m < count; ++m) {
      const float* sc = w.scores + (m0 + m) * stride;
      R* weights = w.weights + (m0 + m) * stride;
      const int used = ceil_div(sees(m0 + m), kLanes);
      F sum = zero();
      const F vb = set1(base[m0 + m]);
      for (int i = 0; i < used; ++i) {
        const F p = exp2<T::kFastExp>(fms(load(sc + i * kLanes), vs, vb));
        sum = add(sum, p);
        T::store_row((char*)(weights + i * kLanes), p);
      }
      for (int i = used; i < weight_groups; ++i)
        T::store_row((char*)(weights + i * kLanes), zero());
      each[m] = sum;
    }
    reduce_add_each(each, count, total + m0);
  }
  for (int m = 0; m < rows; ++m) row_sum[m] = row_sum[m] * w.alpha[m] + total[m];
  return unscaled;
}
