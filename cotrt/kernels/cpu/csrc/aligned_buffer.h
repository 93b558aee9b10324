// Memory for weights and scratch: 64-byte aligned, huge pages asked for where it is large.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace cotrt {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) { reserve(bytes); }
  AlignedBuffer(AlignedBuffer&& o) noexcept { swap(o); }
  AlignedBuffer& operator=(AlignedBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  char* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }

  // At least this many bytes, zeroed when they are new; the old contents are lost.
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    constexpr size_t kHuge = size_t(2) << 20;
    const bool huge = bytes >= 2 * kHuge;
    const size_t rounded = (bytes + 63) / 64 * 64;
    void* memory = nullptr;
    if (posix_memalign(&memory, huge ? kHuge : 64, rounded)) throw std::bad_alloc();
    data_ = static_cast<char*>(memory);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (huge) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
    std::memset(data_, 0, rounded);
    size_ = rounded;
  }

 private:
  void swap(AlignedBuffer& o) {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
  }
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cotrt
