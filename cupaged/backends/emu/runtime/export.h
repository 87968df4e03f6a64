// What Module appends to a kernel's text: for each kernel a function that unpacks an array of pointers to arguments, and
// one that spells its parameters, two letters each: P pointer, C pointer to const, S scalar; then the element's type.
#pragma once
#include <utility>

extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden")));  // the linker's marks round this library's image
extern char _end __attribute__((visibility("hidden")));
}
SIMT_API void simt_image(const void** begin, const void** end) {
  *begin = &__ehdr_start;
  *end = &_end;
}

namespace simt {
template <class T> struct Letter { static constexpr char value = 'V'; };
#define SIMT_LETTER(T, letter) \
  template <> struct Letter<T> { static constexpr char value = letter; };
SIMT_LETTER(void, 'v')
SIMT_LETTER(bool, '?')
SIMT_LETTER(char, 'b')
SIMT_LETTER(signed char, 'b')
SIMT_LETTER(unsigned char, 'B')
SIMT_LETTER(short, 'h')
SIMT_LETTER(unsigned short, 'H')
SIMT_LETTER(int, 'i')
SIMT_LETTER(unsigned, 'I')
SIMT_LETTER(long, 'q')
SIMT_LETTER(unsigned long, 'Q')
SIMT_LETTER(long long, 'q')
SIMT_LETTER(unsigned long long, 'Q')
SIMT_LETTER(float, 'f')
SIMT_LETTER(double, 'd')
SIMT_LETTER(__half, 'e')
SIMT_LETTER(__nv_bfloat16, 'E')
SIMT_LETTER(__nv_fp8_e4m3, '8')
#undef SIMT_LETTER
template <class T> struct Parameter { static constexpr char kind = 'S', type = Letter<T>::value; };
template <class T> struct Parameter<T*> { static constexpr char kind = 'P', type = Letter<T>::value; };
template <class T> struct Parameter<const T*> { static constexpr char kind = 'C', type = Letter<T>::value; };

template <class... A, size_t... I>
__attribute__((no_sanitize("thread"))) static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_cv_t<A>*)arguments[I]...);
}
template <class... A>
__attribute__((no_sanitize("thread"))) static void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}
template <class... A> __attribute__((no_sanitize("thread"))) static void spell(void (*)(A...), char* out) {
  const char spelt[] = {Parameter<std::remove_cv_t<A>>::kind..., 0}, types[] = {Parameter<std::remove_cv_t<A>>::type..., 0};
  for (size_t i = 0; i < sizeof...(A); i++) {
    out[2 * i] = spelt[i];
    out[2 * i + 1] = types[i];
  }
  out[2 * sizeof...(A)] = 0;
}
}  // namespace simt

#define SIMT_EXPORT(kernel)                                                                   \
  SIMT_API __attribute__((no_sanitize("thread"))) void simt_run_##kernel(void** arguments) {  \
    simt::call(&kernel, arguments);                                                           \
  }                                                                                           \
  SIMT_API __attribute__((no_sanitize("thread"))) void simt_spell_##kernel(char* out) { simt::spell(&kernel, out); }
