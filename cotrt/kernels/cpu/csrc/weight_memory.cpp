#include "weight_memory.h"

namespace cotrt {

namespace {
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlab = size_t(64) << 20;
constexpr size_t kPage = 4096;
}  // namespace

class WeightMemory::Slab {
 public:
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Reserved, not used: the system hands out zeroed pages as they are written.
  explicit Slab(size_t bytes) : mapped_(bytes + kHugePage) {
    void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(p);
    const uintptr_t at = reinterpret_cast<uintptr_t>(base_);
    start_ = base_ + ((kHugePage - at % kHugePage) % kHugePage);
    size_ = bytes;
    madvise(start_, bytes, MADV_HUGEPAGE);
  }
  ~Slab() { munmap(base_, mapped_); }
#else
  explicit Slab(size_t bytes) : buffer_(bytes), start_(buffer_.data()), size_(bytes) {}
#endif
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Null where it is full.
  char* take(size_t bytes) {
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    if (used_ + rounded > size_) return nullptr;
    char* p = start_ + used_;
    used_ += rounded;
    return p;
  }

 private:
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  char* base_ = nullptr;
  size_t mapped_ = 0;
#else
  AlignedBuffer buffer_;
#endif
  char* start_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

WeightMemory::WeightMemory(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Slab> open;  // the slab that still has room
  std::lock_guard<std::mutex> lock(mutex);
  if (std::shared_ptr<Slab> slab = open.lock()) {
    if ((data_ = slab->take(bytes))) {
      slab_ = std::move(slab);
      return;
    }
  }
  // Large matrices, an embedding say, have a slab to themselves.
  const bool own = bytes > kSlab / 2;
  const size_t size = own ? (bytes + kPage - 1) / kPage * kPage : kSlab;
  slab_ = std::make_shared<Slab>(size);
  data_ = slab_->take(bytes);
  if (!own) open = slab_;
}

}  // namespace cotrt
